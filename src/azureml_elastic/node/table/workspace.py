"""The storage account of the Azure ML workspace that a job runs in."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote
from urllib.request import Request

from azureml_elastic.errors import TableForbidden, TableNotFound, UsageError
from azureml_elastic.node.table.fetching import fetch

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

__all__ = ["ARM_URL", "WORKSPACE_VARIABLES", "workspace_endpoint"]

ARM_URL = "https://management.azure.com"
"""The Azure Resource Manager of the public cloud."""

WORKSPACE_VARIABLES = ("AZUREML_ARM_SUBSCRIPTION", "AZUREML_ARM_RESOURCEGROUP", "AZUREML_ARM_WORKSPACE_NAME")
"""Set by Azure ML in every job."""

_API_VERSION = "2024-04-01"


def workspace_endpoint(environ: Mapping[str, str], token: TokenCredential, arm_url: str = ARM_URL) -> str:
    """Return the table URL of the workspace's storage account.

    Args:
        environ: of the node.
        token: of an identity that may read the workspace.
        arm_url: of the resource manager.

    Raises:
        UsageError: this is no job of Azure ML.
        TableForbidden: the identity may not read the workspace.
        TableNotFound: there is no such workspace, or it names no storage account.
        TableUnavailable: the resource manager does not answer.
    """
    missing = [name for name in WORKSPACE_VARIABLES if not environ.get(name)]
    if missing:
        raise UsageError(
            f"The rendezvous names no endpoint, and without {', '.join(missing)} in the environment this is no job of "
            "Azure ML whose workspace could be asked for its storage account. Give the rendezvous an endpoint: "
            "https://<account>.table.core.windows.net, or the path of an SQLite file for nodes on one machine."
        )
    subscription, group, workspace = (environ[name] for name in WORKSPACE_VARIABLES)
    path = (
        f"/subscriptions/{quote(subscription, safe='')}/resourceGroups/{quote(group, safe='')}"
        f"/providers/Microsoft.MachineLearningServices/workspaces/{quote(workspace, safe='')}"
    )
    bearer = token.get_token("https://management.azure.com/.default").token
    request = Request(  # noqa: S310 - fetch checks the scheme
        f"{arm_url}{path}?api-version={_API_VERSION}", headers={"Authorization": f"Bearer {bearer}"}
    )
    status, document = fetch(request, f"the storage account of workspace {workspace!r}")
    if status in (401, 403):
        raise TableForbidden(
            f"The job's identity may not read workspace {workspace!r} of resource group {group!r} (HTTP {status}), so "
            "its storage account is unknown. Grant it the role 'Reader' on the workspace, or give the rendezvous the "
            "endpoint https://<account>.table.core.windows.net."
        )
    match document:
        case {"properties": {"storageAccount": str(account)}} if status == HTTPStatus.OK and account.strip("/"):
            return f"https://{account.rstrip('/').rpartition('/')[2]}.table.core.windows.net"
    raise TableNotFound(
        f"Workspace {workspace!r} of resource group {group!r} in subscription {subscription} names no storage account "
        f"(HTTP {status}). Give the rendezvous the endpoint https://<account>.table.core.windows.net."
    )
