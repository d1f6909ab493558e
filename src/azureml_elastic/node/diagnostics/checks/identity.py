"""Check of the identity that opens the table. Findings contain no token, key or signature."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
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
    """Identity that opens the table.

    Args:
        login: credential of the identity.
        assignee: object id for role assignments, or a placeholder.
    """

    UNKNOWN: ClassVar[str] = "<object id of the identity>"

    login: TableCredential
    assignee: str = UNKNOWN


def check_identity(rendezvous: TableRendezvous, environ: Mapping[str, str]) -> tuple[CallerIdentity | None, Finding]:
    """Select the identity that opens the table and request a token.

    Args:
        rendezvous: rendezvous with the kind of credential.
        environ: environment variables of the process.

    Returns:
        The identity, ``None`` if none is needed or there is none, and the finding.
    """
    name = "identity"
    if rendezvous.endpoint is not None and urlsplit(rendezvous.endpoint).scheme != "https":
        return None, Finding(
            name, "ok", "the emulator's published key" if "://" in rendezvous.endpoint else "none is needed"
        )
    try:
        login = choose_credential(rendezvous, environ)
        claims = claims_of(login.token.get_token(STORAGE_SCOPE).token) if login.token is not None else {}
    except ElasticError as error:
        return None, Finding(name, "fail", str(error), "", _ADVICE)
    except Exception as error:  # noqa: BLE001 - azure-identity raises many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return None, Finding(name, "fail", f"no token: {lines[0]}", "", _ADVICE)
    known = {
        "": claims.get("upn") or claims.get("unique_name") or claims.get("app_displayname"),
        "object id": claims.get("oid"),
        "tenant": claims.get("tid"),
    }
    details = [f"{what} {value}".strip() for what, value in known.items() if value]
    identity = CallerIdentity(login, str(claims.get("oid") or CallerIdentity.UNKNOWN))
    return identity, Finding(name, "ok", ", ".join([login.name, *details]))


def claims_of(token: str) -> dict[str, Any]:
    """Return the unverified claims of a JSON web token, an empty dictionary for any other text."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError):
        return {}
    return claims if isinstance(claims, dict) else {}
