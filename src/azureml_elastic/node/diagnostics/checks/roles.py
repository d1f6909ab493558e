"""Advice after a refusal by Azure: the command that grants a role, or the change of the account's firewall."""

from __future__ import annotations

from shlex import quote

from azureml_elastic.errors import TableForbidden
from azureml_elastic.node.table.azure_errors import error_code

__all__ = ["CONTRIBUTOR", "READER", "grant", "refusal_code", "why_refused"]

CONTRIBUTOR = "Storage Table Data Contributor"
READER = "Reader"

_BY_TEXT = (
    ("to perform this operation using this permission", "AuthorizationPermissionMismatch"),
    ("not authorized to perform this operation", "AuthorizationFailure"),
    ("Key based authentication is not permitted", "KeyBasedAuthenticationNotPermitted"),
)
"""Parts of the service's messages and their error codes, for errors without a code."""


def grant(assignee: str, role: str, scope: str) -> str:
    """Return the command that grants a role.

    Args:
        assignee: object id of the identity.
        role: name of the role.
        scope: id of a resource, or a shell expression ``$(...)`` for one.
    """
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
