"""Where data lies: the addresses that jobs use, as a container and a path in the workspace's storage account."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.storage.storage import ARTIFACTS, BLOBS, Storage

__all__ = ["DATASTORES", "Location", "locate"]

DATASTORES = {"workspaceblobstore": BLOBS, "workspaceartifactstore": ARTIFACTS}
"""The container of each datastore."""

_DATASTORE = re.compile(r"azureml:/+(?:.*/)?datastores/([^/]+)/(?:paths/)?(.*)", re.IGNORECASE)
_ASSET = re.compile(r"(?:azureml:)?(/subscriptions/.*/(?:data|codes|models)/.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Location:
    """A file or a folder.

    Args:
        container: of the account.
        path: in it, without slashes at its ends.
    """

    container: str
    path: str

    def __truediv__(self, name: str) -> Location:
        """Return what is called so below this folder."""
        return Location(self.container, f"{self.path}/{name}".strip("/"))


def locate(address: str, asset: Callable[[str], str | None]) -> Location:
    """Return the location of an address.

    Args:
        address: ``azureml://datastores/...``, in its short or long form, the id of an asset, or a blob's URL.
        asset: returns the address that an asset's id stands for.

    Raises:
        UsageError: the address is of another form, or not in this workspace.
    """
    if match := _DATASTORE.fullmatch(address):
        if match[1] not in DATASTORES:
            raise UsageError(
                f"The address {address!r} is in a datastore that the local workspace does not have. It has: "
                f"{', '.join(DATASTORES)}."
            )
        return Location(DATASTORES[match[1]], match[2].strip("/"))
    if match := _ASSET.fullmatch(address):
        behind = asset(match[1])
        if behind is not None:
            return locate(behind, asset)
    parts = urlsplit(address)
    if parts.hostname == Storage.blob_host:
        container, _, path = unquote(parts.path).strip("/").partition("/")
        return Location(container, path.strip("/"))
    raise UsageError(
        f"The address {address!r} is not in the local workspace. Use a local path, which is uploaded, or "
        "azureml://datastores/workspaceblobstore/paths/<path>."
    )
