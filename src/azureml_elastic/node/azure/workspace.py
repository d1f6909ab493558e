"""The clouds of Azure, and the storage account of a job's workspace, read from the resource manager."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import TableForbidden, TableNotFound, TableUnavailable, UsageError
from azureml_elastic.node.azure.http import CALL_TIMEOUT, HttpRequest, Reply, fetch

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential


@dataclass(frozen=True)
class Cloud:
    """Cloud of Azure.

    Args:
        storage_suffix: DNS suffix of storage accounts.
        domain: domain of the endpoints that Azure ML serves to jobs.
    """

    name: str
    arm_url: str
    storage_suffix: str
    domain: str

    def table_url(self, account: str) -> str:
        """Return the default table URL of a storage account."""
        return f"https://{account}.table.{self.storage_suffix}"


CLOUDS = (
    Cloud("AzureCloud", "https://management.azure.com", "core.windows.net", "azureml.ms"),
    Cloud("AzureChinaCloud", "https://management.chinacloudapi.cn", "core.chinacloudapi.cn", "azure.cn"),
    Cloud("AzureUSGovernment", "https://management.usgovcloudapi.net", "core.usgovcloudapi.net", "azure.us"),
)
"""All clouds, the public one first. Source: ``azure.ai.ml._azure_environments``."""

ARM_URL = CLOUDS[0].arm_url
"""URL of the Azure Resource Manager of the public cloud."""

WORKSPACE_API = "2024-04-01"
_STORAGE_API = "2023-05-01"
_ACCOUNT_TIMEOUT = timedelta(seconds=5)  # short: the default URL is a good fallback


@dataclass(frozen=True)
class Workspace:
    """Workspace of Azure ML; ``group`` is its resource group."""

    subscription: str
    group: str
    name: str

    @property
    def id(self) -> str:
        """Resource id."""
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"
        )


@dataclass(frozen=True)
class ResourceManager:
    """Client of Azure's resource manager.

    Args:
        url: URL of the resource manager; ``None`` for that of the cloud.
    """

    token: TokenCredential
    cloud: Cloud
    url: str | None = None

    def workspace(self, workspace: Workspace) -> Reply:
        """Read the resource of a workspace.

        Raises:
            TableForbidden: the identity gets no token.
            TableUnavailable: the resource manager does not answer.
        """
        return self._get(workspace.id, WORKSPACE_API, f"the storage account of workspace {workspace.name!r}")

    def account(self, account: str) -> Reply:
        """Read the resource of a storage account by its id; raises as :meth:`workspace`."""
        return self._get(
            account, _STORAGE_API, f"the addresses of storage account {_name(account)!r}", _ACCOUNT_TIMEOUT
        )

    def _get(self, resource: str, version: str, what: str, timeout: timedelta = CALL_TIMEOUT) -> Reply:
        request = HttpRequest("GET", f"{self.url or self.cloud.arm_url}{quote(resource)}?api-version={version}")
        return fetch(request, what, token=self.token, scope=f"{self.cloud.arm_url}/.default", timeout=timeout)


def workspace_of(environment: NodeEnvironment) -> Workspace:
    """Return the workspace of the job whose environment this is.

    Raises:
        UsageError: the environment is not that of an Azure ML job.
    """
    found = environment.workspace
    if found is None:
        raise UsageError(
            f"The rendezvous names no endpoint, and without {', '.join(environment.missing_workspace)} in the "
            "environment this is no job of Azure ML and has no workspace with a storage account. Give the rendezvous "
            "an endpoint: https://<account>.table.core.windows.net, or the path of an SQLite file for nodes on one "
            "machine."
        )
    return Workspace(*found)


def workspace_endpoint(environment: NodeEnvironment, token: TokenCredential, arm_url: str | None = None) -> str:
    """Return the table URL of the workspace's storage account.

    The URL follows from the account's name, except for accounts in a DNS zone of their own. If the default host has no
    address, the URL is read from the account's resource, provided that the identity may read it.

    Args:
        arm_url: URL of the resource manager; ``None`` for that of the node's cloud.

    Raises:
        UsageError: the environment is not that of an Azure ML job, or its cloud is unknown.
        TableForbidden: the identity may not read the workspace.
        TableNotFound: the workspace does not exist or names no storage account.
        TableUnavailable: the resource manager does not answer.
    """
    workspace, cloud = workspace_of(environment), cloud_of(environment)
    manager = ResourceManager(token, cloud, arm_url)
    reply = manager.workspace(workspace)
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
    # Most identities of nodes may not read the account, and almost all accounts have the usual address.
    if _has_address(usual):
        return usual
    try:
        return table_url_in(manager.account(account)) or usual
    except (TableForbidden, TableUnavailable) as error:
        _LOG.info("The table's address is assumed to be %s: %s", usual, error)
        return usual


def account_in(reply: Reply) -> str | None:
    """Return the id of the storage account in a workspace's resource, ``None`` if there is none."""
    match reply.document:
        case {"properties": {"storageAccount": str(account)}} if reply.status == HTTPStatus.OK and account.strip("/"):
            return account.rstrip("/")
    return None


def table_url_in(reply: Reply) -> str | None:
    """Return the table URL in a storage account's resource, ``None`` if there is none."""
    match reply.document:
        case {"properties": {"primaryEndpoints": {"table": str(url)}}} if reply.status == HTTPStatus.OK:
            return url.rstrip("/") or None
    return None


def _name(account: str) -> str:
    return account.rpartition("/")[2]


def _has_address(url: str) -> bool:
    """Return whether the host has an address, or a proxy resolves it."""
    host = urlsplit(url).hostname or ""
    if "https" in getproxies() and not proxy_bypass(host):
        return True
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def cloud_of(environment: NodeEnvironment) -> Cloud:
    """Return the cloud named by ``AZUREML_CURRENT_CLOUD``, else that of ``AZUREML_SERVICE_ENDPOINT``.

    Raises:
        UsageError: the cloud's name is unknown.
    """
    if name := environment.cloud:
        for cloud in CLOUDS:
            if cloud.name.lower() == name.lower():
                return cloud
        raise UsageError(
            f"AZUREML_CURRENT_CLOUD={name!r} is not a supported cloud. Set it to one of "
            f"{', '.join(cloud.name for cloud in CLOUDS)}; for another cloud give the rendezvous the table URL of "
            "a storage account as its endpoint."
        )
    host = urlsplit(environment.service_endpoint).hostname or ""
    return next((cloud for cloud in CLOUDS if host.endswith(f".{cloud.domain}")), CLOUDS[0])
