"""Check of the identity that opens the table, and advice on roles. Findings contain no token, key or signature."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any, ClassVar
from urllib.parse import urlsplit

from azureml_elastic.config import TableRendezvous
from azureml_elastic.errors import ElasticError, TableForbidden
from azureml_elastic.node.azure.credentials import STORAGE_SCOPE, TableCredential, choose_credential
from azureml_elastic.node.diagnostics.findings import Finding
from azureml_elastic.node.table.azure_errors import error_code

__all__ = [
    "CONTRIBUTOR",
    "READER",
    "CallerIdentity",
    "check_identity",
    "claims_of",
    "grant",
    "refusal_code",
    "why_refused",
]

CONTRIBUTOR = "Storage Table Data Contributor"
READER = "Reader"
_BY_TEXT = (
    ("to perform this operation using this permission", "AuthorizationPermissionMismatch"),
    ("not authorized to perform this operation", "AuthorizationFailure"),
    ("Key based authentication is not permitted", "KeyBasedAuthenticationNotPermitted"),
)
"""Parts of the service's messages and their error codes, for errors without a code."""

_ADVICE = (
    "On your own machine: `az login`. In a job: give the compute a managed identity, or submit with "
    "identity=UserIdentityConfiguration(), and see credential= of TableRendezvous (docs/explanation/security.md)."
)


@dataclass(frozen=True)
class CallerIdentity:
    """Identity that opens the table; ``assignee`` is its object id for role assignments, or a placeholder."""

    UNKNOWN: ClassVar[str] = "<object id of the identity>"

    login: TableCredential
    assignee: str = UNKNOWN


def check_identity(rendezvous: TableRendezvous, environ: Mapping[str, str]) -> tuple[CallerIdentity | None, Finding]:
    """Select the identity that opens the table, and request a token; the identity is ``None`` if none is needed."""
    name = "identity"
    if rendezvous.endpoint is not None and urlsplit(rendezvous.endpoint).scheme != "https":
        value = "the emulator's published key" if "://" in rendezvous.endpoint else "none is needed"
        return None, Finding(name, "ok", value)
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


def grant(assignee: str, role: str, scope: str) -> str:
    """Return the command that grants a role; the scope is a resource id or a shell expression ``$(...)`` for one."""
    where = scope if scope.startswith("$(") else quote(scope)
    return f'az role assignment create --assignee {assignee} --role "{role}" --scope {where}'


def refusal_code(error: TableForbidden) -> str:
    """Return the error code of the service, empty if there is none."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, Exception) and (code := error_code(link)):
            return code
        link = link.__cause__
    return next((code for text, code in _BY_TEXT if text in str(error)), "")


def why_refused(code: str, assignee: str, account: str, scope: str | None) -> str:
    """Return the advice for a table to which access was refused.

    Args:
        code: error code of the service, or an empty string.
        assignee: object id of the identity.
        account: name of the storage account.
        scope: resource id of the account, ``None`` if unknown.
    """
    role = grant(assignee, CONTRIBUTOR, scope or f"$(az storage account show --name {account} --query id -o tsv)")
    wait = "It takes up to ten minutes to become effective."
    which = f"--ids {quote(scope)}" if scope else f"--name {account}"
    network = (
        f"See its rules with `az storage account show {which} --query "
        "'{public: publicNetworkAccess, rules: networkRuleSet}'`, and admit the nodes' subnet with `az storage account "
        f"network-rule add --account-name {account} --subnet <id of the subnet>` (your own address with --ip-address), "
        "or give the nodes' virtual network a private endpoint for the account's tables."
    )
    match code:
        case "AuthorizationPermissionMismatch" | "InsufficientAccountPermissions":
            return f"The identity lacks the role; the network is not the reason. Run: {role}  {wait}"
        case "AuthorizationFailure":
            return (
                "The account's firewall does not admit this machine; for a missing role the error would be "
                f"AuthorizationPermissionMismatch. {network} If the rules admit it already, run: {role}  {wait}"
            )
        case "KeyBasedAuthenticationNotPermitted":
            return (
                "The account takes no keys (allowSharedKeyAccess is false). Leave the connection string out and use an "
                f"identity: credential='managed_identity' or 'on_behalf_of'. It needs a role: {role}  {wait}"
            )
        case "AuthenticationFailed" | "InvalidAuthenticationInfo" | "NoAuthenticationInformation":
            return (
                "The login itself is refused: a key that has been renewed, a token of another tenant, or a clock that "
                "is wrong by minutes. Copy the connection string again, or log in to the account's tenant."
            )
    return f"Either the role is missing. Run: {role}  {wait} Or the account's firewall refuses this machine. {network}"
