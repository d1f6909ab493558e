"""Unsigned tokens for the client and the nodes, which only the local workspace accepts."""

from __future__ import annotations

import base64
import json
import time
from typing import Any
from urllib.parse import parse_qs

from azureml_elastic.testing.api.messages import Answer, Request, document, refusal

__all__ = ["StaticCredential", "answer_node"]

_TOKEN_S = 3600


class StaticCredential:
    """Credential that issues unsigned tokens."""

    def get_token(self, *scopes: str, **_: Any) -> Any:
        """Return a token for the first scope."""
        from azure.core.credentials import AccessToken

        expires = int(time.time()) + _TOKEN_S
        return AccessToken(_mint(scopes[0], expires), expires)


def _mint(scope: str, expires: int) -> str:
    audience = scope.removesuffix("/.default")
    claims = {"aud": audience, "tid": "local", "oid": "local", "exp": expires}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in ({"alg": "none"}, claims)]
    return ".".join([*(part.rstrip("=") for part in parts), ""])


def answer_node(request: Request) -> Answer:
    """Respond as the token service of a node."""
    if request.path != "/token":
        return refusal(404, "NotFound", f"A node of the local workspace serves tokens only, not {request.path}.")
    parameters = {**request.query, **parse_qs(request.body.decode())}
    if "resource" not in parameters:
        return refusal(400, "BadRequest", "Give the resource that the token is for.")
    expires = int(time.time()) + _TOKEN_S
    resource = parameters["resource"][0]
    return document(
        {
            "access_token": _mint(resource, expires),
            "expires_in": str(_TOKEN_S),
            "expires_on": str(expires),
            "resource": resource,
            "token_type": "Bearer",
        }
    )
