"""Checks of what a run uses in Azure: the identity, the workspace with its storage account, and the table."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from http import HTTPStatus
from shlex import quote
from typing import Any, ClassVar
from urllib.parse import urlsplit

from azureml_elastic.config import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError, RowChanged, TableForbidden, TableNotFound
from azureml_elastic.node.azure.credentials import STORAGE_SCOPE, TableCredential, choose_credential
from azureml_elastic.node.azure.http import Reply
from azureml_elastic.node.azure.workspace import Cloud, ResourceManager, Workspace, account_in, table_url_in
from azureml_elastic.node.diagnostics.findings import Finding
from azureml_elastic.node.table import Table, open_table
from azureml_elastic.node.table.azure_errors import error_code

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


def check_identity(rendezvous: TableRendezvous, environment: NodeEnvironment) -> tuple[CallerIdentity | None, Finding]:
    """Select the identity that opens the table, and request a token; the identity is ``None`` if none is needed."""
    name = "identity"
    if rendezvous.endpoint is not None and urlsplit(rendezvous.endpoint).scheme != "https":
        value = "the emulator's published key" if "://" in rendezvous.endpoint else "none is needed"
        return None, Finding(name, "ok", value)
    try:
        login = choose_credential(rendezvous, environment)
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


@dataclass(frozen=True)
class Account:
    """Storage account: the URL of its tables, and its resource id if known."""

    url: str
    id: str | None = None

    @property
    def name(self) -> str:
        """Name of the account."""
        return self.id.rpartition("/")[2] if self.id else (urlsplit(self.url).hostname or "").partition(".")[0]


def find_account(
    workspace: Workspace, identity: CallerIdentity, cloud: Cloud
) -> Generator[Finding, None, Account | None]:
    """Yield the findings about the workspace and its account; return the account."""
    assert identity.login.token is not None
    manager = ResourceManager(identity.login.token, cloud)
    began = time.monotonic()
    try:
        reply = manager.workspace(workspace)
    except ElasticError as error:
        yield Finding("workspace", "fail", str(error), "", "See the line about the resource manager.")
        return None
    yield _workspace_finding(workspace, identity, reply, time.monotonic() - began)
    account = account_in(reply)
    if account is None:
        return None
    usual = cloud.table_url(account.rpartition("/")[2])
    try:
        reply = manager.account(account)
    except ElasticError as error:
        yield Finding("storage account", "warn", f"{account}; not read: {error}")
        return Account(usual, account)
    url = table_url_in(reply)
    yield _account_finding(account, usual, url, reply, identity)
    return None if reply.status == HTTPStatus.OK and url is None else Account(url or usual, account)


def _workspace_finding(workspace: Workspace, identity: CallerIdentity, reply: Reply, seconds: float) -> Finding:
    where = f"{workspace.name} of resource group {workspace.group}, subscription {workspace.subscription}"
    instead = "Or name the account with endpoint=; then the workspace is not read."
    if reply.status == HTTPStatus.OK:
        if account_in(reply) is not None:
            return Finding("workspace", "ok", f"{where} ({seconds * 1000:.0f} ms)")
        return Finding("workspace", "fail", f"{where} names no storage account", "", "Name one with endpoint=.")
    if reply.status == HTTPStatus.FORBIDDEN:
        advice = f"Run: {grant(identity.assignee, READER, workspace.id)}  {instead}"
    elif reply.status == HTTPStatus.UNAUTHORIZED:
        advice = "The token is of another tenant or refused. Log in to the workspace's tenant: az login --tenant <id>."
    else:
        advice = f"Check the names, and that this identity has access to that subscription. {instead}"
    return Finding("workspace", "fail", f"{where}: {_code(reply)}", "", advice)


def _account_finding(account: str, usual: str, url: str | None, reply: Reply, identity: CallerIdentity) -> Finding:
    name = "storage account"
    if reply.status != HTTPStatus.OK:
        value = f"{account}; its address follows from its name ({usual}), because it may not be read: {_code(reply)}"
        return Finding(name, "ok", value)
    document: Mapping[str, Any] = reply.document if isinstance(reply.document, dict) else {}
    properties = document.get("properties") or {}
    if url is None:
        kind = f"{document.get('kind')}, {(document.get('sku') or {}).get('name')}"
        advice = "Accounts of this kind have no tables. Name a StorageV2 account with endpoint=."
        return Finding(name, "fail", f"{account} ({kind}) has no table service", "", advice)
    notes = []
    if properties.get("publicNetworkAccess") == "Disabled":
        notes.append("private endpoints only")
    elif (properties.get("networkAcls") or {}).get("defaultAction") == "Deny":
        notes.append("only from the networks that its firewall admits")
    if properties.get("allowSharedKeyAccess") is False:
        notes.append("no keys, only identities")
        if identity.login.connection_string is not None:
            advice = "Leave the connection string out and use an identity."
            return Finding(name, "fail", f"{account} takes no keys", "", advice)
    suffix = f"; {', '.join(notes)}" if notes else ""
    return Finding(name, "ok", f"{account}, tables at {url}{suffix}")


def _code(reply: Reply) -> str:
    """Return the resource manager's error code and the status."""
    match reply.document:
        case {"error": {"code": str(code)}}:
            return f"{code} (HTTP {reply.status})"
    return f"HTTP {reply.status}"


_KEY = "doctor"
_SLOW_SECONDS = 1.0


class _WrongResultError(Exception):
    """An operation had a wrong result."""


def check_table(
    rendezvous: TableRendezvous, environment: NodeEnvironment, account: Account | None, identity: CallerIdentity | None
) -> Iterator[Finding]:
    """Create the table if it is missing, and insert, read, replace and delete a row.

    Args:
        account: storage account of the table, ``None`` for an emulator or a file.
        identity: identity that opens the table, ``None`` if none is needed.
    """
    tables: list[Table] = []
    etags: list[str] = []

    def open_() -> None:
        run = f"doctor-{secrets.token_hex(6)}"
        # Without the wait of a node: a person waits for the result.
        tables.append(open_table(rendezvous, run, environment, timeout=timedelta(0)))

    def insert() -> None:
        etags.append(tables[0].insert(_KEY, {"step": 1}))

    def read() -> None:
        row = tables[0].get(_KEY)
        if row is None or row.value != {"step": 1}:
            raise _WrongResultError(f"read {row.value if row else 'nothing'} back")

    def replace_row() -> None:
        etags.append(tables[0].replace(_KEY, {"step": 2}, etags[0]))

    def replace_outdated() -> None:
        try:
            tables[0].replace(_KEY, {"step": 3}, etags[0])
        except RowChanged:
            return
        # The rendezvous rests on this refusal: without it two nodes could lead the same round.
        raise _WrongResultError("a row was replaced although its version was outdated")

    def delete() -> None:
        tables[0].delete(_KEY, etags[1])
        if tables[0].get(_KEY) is not None:
            raise _WrongResultError("a deleted row is there still")

    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("open or make it", open_),
        ("insert a row", insert),
        ("read it", read),
        ("replace this version", replace_row),
        ("an old version is refused", replace_outdated),
        ("delete it", delete),
    )
    try:
        for what, step in steps:
            finding = _timed(f"table: {what}", step, account, identity)
            if step is open_ and finding.status != "fail":
                finding = replace(finding, value=f"{finding.value}, {rendezvous.table}")
            yield finding
            if finding.status == "fail":
                return
    finally:
        for table in tables:
            table.close()


def _timed(
    name: str, operation: Callable[[], None], account: Account | None, identity: CallerIdentity | None
) -> Finding:
    began = time.monotonic()
    try:
        operation()
    except _WrongResultError as error:
        advice = "Runs cannot rely on this table. Is a proxy or an old emulator in between?"
        return Finding(name, "fail", str(error), "", advice)
    except TableForbidden as error:
        if account is None:
            return Finding(name, "fail", str(error))
        code = refusal_code(error)
        login = identity.login.name if identity is not None else "the login"
        problem = f"{account.url} refuses {login}: {code}" if code else str(error)
        assignee = identity.assignee if identity is not None else CallerIdentity.UNKNOWN
        return Finding(name, "fail", problem, "", why_refused(code, assignee, account.name, account.id))
    except ElasticError as error:
        advice = "See the line about the table service." if isinstance(error, TableNotFound) else ""
        return Finding(name, "fail", str(error), "", advice)
    seconds = time.monotonic() - began
    advice = "A slow table delays the start and every change of a run. Is the account in the nodes' region?"
    return Finding(name, "warn" if seconds > _SLOW_SECONDS else "ok", f"{seconds * 1000:.0f} ms", "", advice)
