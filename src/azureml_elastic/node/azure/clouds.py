"""The clouds of Azure: public, China and US government."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from azureml_elastic.errors import UsageError

__all__ = ["CLOUDS", "CLOUD_VARIABLE", "Cloud", "cloud_of"]

CLOUD_VARIABLE = "AZUREML_CURRENT_CLOUD"
"""Environment variable with the name of the cloud, as in the SDK."""


@dataclass(frozen=True)
class Cloud:
    """Addresses of one cloud.

    Args:
        name: name as in Azure's tools.
        arm_url: URL of the resource manager.
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


def cloud_of(environ: Mapping[str, str]) -> Cloud:
    """Return the cloud named by ``AZUREML_CURRENT_CLOUD``, else that of ``AZUREML_SERVICE_ENDPOINT``.

    Raises:
        UsageError: the cloud's name is unknown.
    """
    if name := environ.get(CLOUD_VARIABLE):
        for cloud in CLOUDS:
            if cloud.name.lower() == name.lower():
                return cloud
        raise UsageError(
            f"{CLOUD_VARIABLE}={name!r} is not a supported cloud. Set it to one of "
            f"{', '.join(cloud.name for cloud in CLOUDS)}; for another cloud give the rendezvous the table URL of "
            "a storage account as its endpoint."
        )
    host = urlsplit(environ.get("AZUREML_SERVICE_ENDPOINT", "")).hostname or ""
    return next((cloud for cloud in CLOUDS if host.endswith(f".{cloud.domain}")), CLOUDS[0])
