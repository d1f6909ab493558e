"""Which identity asks, in words: never a token, a key or a signature."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from azureml_elastic.config import TableRendezvous
from azureml_elastic.errors import ElasticError
from azureml_elastic.node.azure.credentials import STORAGE_SCOPE, TableCredential, choose_credential
from azureml_elastic.node.diagnostics.findings import Finding

__all__ = ["CallerIdentity", "check_identity", "claims_of"]

_ADVICE = (
    "On your own machine: `az login`. In a job: give the compute a managed identity, or submit with "
    "identity=UserIdentityConfiguration(), and see credential= of TableRendezvous (docs/explanation/table.md)."
)


@dataclass(frozen=True)
class CallerIdentity:
    """Who asks.

    Args:
        login: the way in.
        object_id: object id for role assignments, empty for a key.
    """

    login: TableCredential
    object_id: str = ""

    @property
    def assignee(self) -> str:
        """The object id for a command, or what to put there."""
        return self.object_id or "<object id of the identity>"


def check_identity(rendezvous: TableRendezvous, environ: Mapping[str, str]) -> tuple[CallerIdentity | None, Finding]:
    """Find the identity that opens the table, and get a token of it.

    Args:
        rendezvous: says which.
        environ: environment variables of the process.
    """
    name = "identity"
    if rendezvous.endpoint is not None and urlsplit(rendezvous.endpoint).scheme != "https":
        who = "the emulator's published key" if "://" in rendezvous.endpoint else "none is needed"
        return None, Finding(name, "ok", who)
    try:
        login = choose_credential(rendezvous, environ)
        claims = claims_of(login.token.get_token(STORAGE_SCOPE).token) if login.token is not None else {}
    except ElasticError as error:
        return None, Finding(name, "fail", str(error), "", _ADVICE)
    except Exception as error:  # noqa: BLE001 - what azure-identity raises has many classes
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return None, Finding(name, "fail", f"no token: {lines[0]}", "", _ADVICE)
    known = {
        "": claims.get("upn") or claims.get("unique_name") or claims.get("app_displayname"),
        "object id": claims.get("oid"),
        "tenant": claims.get("tid"),
    }
    details = [f"{what} {value}".strip() for what, value in known.items() if value]
    return CallerIdentity(login, str(claims.get("oid") or "")), Finding(name, "ok", ", ".join([login.name, *details]))


def claims_of(token: str) -> dict[str, Any]:
    """Return what a token says of its holder, nothing for one that is no JSON web token. Nobody's word is checked."""
    pieces = token.split(".")
    if len(pieces) < 2:  # noqa: PLR2004 - header and claims
        return {}
    try:
        claims = json.loads(base64.urlsafe_b64decode(pieces[1] + "=" * (-len(pieces[1]) % 4)))
    except ValueError:
        return {}
    return claims if isinstance(claims, dict) else {}
