"""The storage account of the Azure ML workspace that a job runs in."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit
from urllib.request import Request, getproxies, proxy_bypass

from azureml_elastic.errors import TableForbidden, TableNotFound, TableUnavailable, UsageError
from azureml_elastic.node.azure.clouds import CLOUDS, Cloud, cloud_of
from azureml_elastic.node.azure.http import Reply, exchange

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

__all__ = [
    "ARM_URL",
    "WORKSPACE_VARIABLES",
    "Arm",
    "Workspace",
    "account_in",
    "table_url_in",
    "workspace_endpoint",
    "workspace_of",
]

_LOG = logging.getLogger(__name__)

ARM_URL = CLOUDS[0].arm_url
"""The Azure Resource Manager of the public cloud."""

WORKSPACE_VARIABLES = ("AZUREML_ARM_SUBSCRIPTION", "AZUREML_ARM_RESOURCEGROUP", "AZUREML_ARM_WORKSPACE_NAME")
"""Set by Azure ML in every job."""

_WORKSPACE_API = "2024-04-01"
_STORAGE_API = "2023-05-01"
_ONCE = timedelta(seconds=5)
"""For what there is a good guess of."""


@dataclass(frozen=True)
class Workspace:
    """A workspace of Azure ML.

    Args:
        subscription: id.
        group: the resource group.
        name: of the workspace.
    """

    subscription: str
    group: str
    name: str

    @property
    def id(self) -> str:
        """The id of its resource."""
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"
        )


class Arm:
    """Reads resources at the resource manager.

    Args:
        token: of an identity that may read them.
        cloud: whose resource manager it is.
        arm_url: of the resource manager; ``None`` for the cloud's.
    """

    def __init__(self, token: TokenCredential, cloud: Cloud, arm_url: str | None = None) -> None:
        self._token = token
        self._cloud = cloud
        self._url = arm_url or cloud.arm_url

    def workspace(self, workspace: Workspace) -> Reply:
        """Return the answer to a request for a workspace.

        Raises:
            TableForbidden: the identity has no token.
            TableUnavailable: the resource manager does not answer.
        """
        return self._get(workspace.id, _WORKSPACE_API, f"the storage account of workspace {workspace.name!r}")

    def account(self, account: str, patience: timedelta = _ONCE) -> Reply:
        """Return the answer to a request for a storage account.

        Args:
            account: its id.
            patience: for all attempts together.

        Raises:
            TableForbidden: the identity has no token.
            TableUnavailable: the resource manager does not answer.
        """
        return self._get(account, _STORAGE_API, f"the addresses of storage account {_name(account)!r}", patience)

    def _get(self, resource: str, version: str, what: str, patience: timedelta | None = None) -> Reply:
        bearer = self._token.get_token(self._cloud.arm_scope).token
        path = "/".join(quote(part, safe="") for part in resource.split("/"))
        request = Request(  # noqa: S310 - exchange checks the scheme
            f"{self._url}{path}?api-version={version}", headers={"Authorization": f"Bearer {bearer}"}
        )
        return exchange(request, what) if patience is None else exchange(request, what, patience=patience)


def workspace_of(environ: Mapping[str, str]) -> Workspace:
    """Return the workspace that a job runs in.

    Args:
        environ: of the node.

    Raises:
        UsageError: this is no job of Azure ML.
    """
    missing = [name for name in WORKSPACE_VARIABLES if not environ.get(name)]
    if missing:
        raise UsageError(
            f"The rendezvous names no endpoint, and without {', '.join(missing)} in the environment this is no job of "
            "Azure ML whose workspace could be asked for its storage account. Give the rendezvous an endpoint: "
            "https://<account>.table.core.windows.net, or the path of an SQLite file for nodes on one machine."
        )
    return Workspace(*(environ[name] for name in WORKSPACE_VARIABLES))


def workspace_endpoint(environ: Mapping[str, str], token: TokenCredential, arm_url: str | None = None) -> str:
    """Return the table URL of the workspace's storage account.

    An account has its URL by its name, but for those in a DNS zone of their own. Where that host has no address, the
    account itself is asked, if the identity may read it.

    Args:
        environ: of the node.
        token: of an identity that may read the workspace.
        arm_url: of the resource manager; ``None`` for that of the node's cloud.

    Raises:
        UsageError: this is no job of Azure ML, or of an unknown cloud.
        TableForbidden: the identity may not read the workspace.
        TableNotFound: there is no such workspace, or it names no storage account.
        TableUnavailable: the resource manager does not answer.
    """
    workspace, cloud = workspace_of(environ), cloud_of(environ)
    arm = Arm(token, cloud, arm_url)
    reply = arm.workspace(workspace)
    name, group = workspace.name, workspace.group
    if reply.status in (401, 403):
        raise TableForbidden(
            f"The job's identity may not read workspace {name!r} of resource group {group!r} (HTTP {reply.status}), so "
            "its storage account is unknown. Grant it the role 'Reader' on the workspace, or give the rendezvous the "
            "endpoint https://<account>.table.core.windows.net."
        )
    account = account_in(reply)
    if account is None:
        raise TableNotFound(
            f"Workspace {name!r} of resource group {group!r} in subscription {workspace.subscription} names no storage "
            f"account (HTTP {reply.status}). Give the rendezvous the endpoint "
            "https://<account>.table.core.windows.net."
        )
    usual = cloud.table_url(_name(account))
    if _has_address(usual):
        return usual
    try:
        found = table_url_in(arm.account(account))
    except (TableForbidden, TableUnavailable) as error:
        _LOG.info("%s is taken for the table's address: %s", usual, error)
        return usual
    return found or usual


def account_in(reply: Reply) -> str | None:
    """Return the id of the storage account that a workspace's resource names."""
    match reply.document:
        case {"properties": {"storageAccount": str(account)}} if reply.status == HTTPStatus.OK and account.strip("/"):
            return account.rstrip("/")
    return None


def table_url_in(reply: Reply) -> str | None:
    """Return the table URL that a storage account's resource names."""
    match reply.document:
        case {"properties": {"primaryEndpoints": {"table": str(url)}}} if reply.status == HTTPStatus.OK:
            return url.rstrip("/") or None
    return None


def _name(account: str) -> str:
    return account.rpartition("/")[2]


def _has_address(url: str) -> bool:
    """Return whether the host has an address, or a proxy knows better."""
    host = urlsplit(url).hostname or ""
    if "https" in getproxies() and not proxy_bypass(host):
        return True
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False
