"""Unsigned tokens for the client and the nodes, which only the local workspace accepts."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import parse_qs

from azureml_elastic.testing.messages import Answer, Request, document, refusal

__all__ = ["StaticCredential", "answer_node", "signed_in"]

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


def signed_in(answer: Callable[[Request], Answer], public: Collection[str] = ()) -> Callable[[Request], Answer]:
    """Return a request handler that refuses requests without a token.

    Args:
        answer: handler of the other requests.
        public: beginnings of the paths that need no token.
    """

    def checked(request: Request) -> Answer:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if (scheme.lower() == "bearer" and token) or request.path.startswith(tuple(public)):
            return answer(request)
        return refusal(401, "AuthenticationFailed", "Authentication failed. The header 'Authorization' has no token.")

    return checked


def answer_node(request: Request) -> Answer:
    """Respond as the token service of a node."""
    if request.path != "/token":
        return refusal(404, "NotFound", f"A node of the local workspace serves tokens only, not {request.path}.")
    parameters = {**request.query, **parse_qs(request.body.decode(errors="replace"))}
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
