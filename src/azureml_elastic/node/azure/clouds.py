"""The clouds of Azure, whose services have other names in China and for the US government."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from azureml_elastic.errors import UsageError

__all__ = ["CLOUDS", "CLOUD_VARIABLE", "Cloud", "cloud_of"]

CLOUD_VARIABLE = "AZUREML_CURRENT_CLOUD"
"""Names the cloud, as for the SDK."""


@dataclass(frozen=True)
class Cloud:
    """One of them.

    Args:
        name: as Azure's own tools write it.
        arm_url: of the resource manager.
        storage_suffix: of the names of storage accounts.
        domain: in which Azure ML serves a job's endpoints.
    """

    name: str
    arm_url: str
    storage_suffix: str
    domain: str

    @property
    def arm_scope(self) -> str:
        """Of tokens for the resource manager."""
        return f"{self.arm_url}/.default"

    def table_url(self, account: str) -> str:
        """Return the table URL that a storage account has by its name."""
        return f"https://{account}.table.{self.storage_suffix}"


CLOUDS = (
    Cloud("AzureCloud", "https://management.azure.com", "core.windows.net", "azureml.ms"),
    Cloud("AzureChinaCloud", "https://management.chinacloudapi.cn", "core.chinacloudapi.cn", "azure.cn"),
    Cloud("AzureUSGovernment", "https://management.usgovcloudapi.net", "core.usgovcloudapi.net", "azure.us"),
)
"""The public one first. Source: ``azure.ai.ml._azure_environments``."""


def cloud_of(environ: Mapping[str, str]) -> Cloud:
    """Return the cloud that ``AZUREML_CURRENT_CLOUD`` names, else the one that the job runs in.

    Args:
        environ: of the node; ``AZUREML_SERVICE_ENDPOINT`` tells where the job runs.

    Raises:
        UsageError: there is no cloud of this name.
    """
    if name := environ.get(CLOUD_VARIABLE):
        for cloud in CLOUDS:
            if cloud.name.lower() == name.lower():
                return cloud
        raise UsageError(
            f"{CLOUD_VARIABLE}={name!r} is no cloud that this library knows. Set it to one of "
            f"{', '.join(cloud.name for cloud in CLOUDS)}, and for another cloud give the rendezvous the table URL of "
            "a storage account as its endpoint."
        )
    host = urlsplit(environ.get("AZUREML_SERVICE_ENDPOINT", "")).hostname or ""
    return next((cloud for cloud in CLOUDS if host.endswith(f".{cloud.domain}")), CLOUDS[0])
