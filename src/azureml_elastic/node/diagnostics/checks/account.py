"""Check of the workspace and its storage account."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from azureml_elastic.errors import ElasticError
from azureml_elastic.node.azure.http import Reply
from azureml_elastic.node.azure.workspace import Cloud, ResourceManager, Workspace, account_in, table_url_in
from azureml_elastic.node.diagnostics.checks.identity import READER, CallerIdentity, grant
from azureml_elastic.node.diagnostics.findings import Finding

__all__ = ["Account", "find_account"]


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
