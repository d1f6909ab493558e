"""Data addresses of jobs, resolved to a container and a path in the workspace's storage account."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.storage.account import ARTIFACTS, BLOBS, StorageAccount

__all__ = ["DATASTORES", "Location", "locate"]

DATASTORES = {"workspaceblobstore": BLOBS, "workspaceartifactstore": ARTIFACTS}
"""Containers by datastore name."""

_DATASTORE = re.compile(r"azureml:/+(?:.*/)?datastores/([^/]+)/(?:paths/)?(.*)", re.IGNORECASE)
_ASSET = re.compile(r"(?:azureml:)?(/subscriptions/.*/(?:data|codes|models)/.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Location:
    """Location of a file or folder: a container, and a path in it without leading or trailing slashes.

    Raises:
        UsageError: the path leads out of the container.
    """

    container: str
    path: str

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        outside = {".", ".."}.intersection([self.container, *parts]) or "/" in self.container or self.path[:1] == "/"
        if outside or not self.container or "\0" in self.container + self.path:
            raise UsageError(
                f"{self.container}/{self.path} is not a location in the local workspace: it has no container, or leads "
                "out of it. Give a path without '.' and '..' below a container."
            )

    def __contains__(self, other: Location) -> bool:
        """Return whether another location is this one or below it."""
        within = not self.path or other.path == self.path or other.path.startswith(f"{self.path}/")
        return other.container == self.container and within

    def __truediv__(self, name: str) -> Location:
        """Return the location of a child."""
        return Location(self.container, f"{self.path}/{name}".strip("/"))


def locate(address: str, asset: Callable[[str], str | None]) -> Location:
    """Return the location of an address.

    Args:
        address: ``azureml://datastores/...`` in its short or long form, an asset id, or the URL of a blob.
        asset: function that returns the address of an asset by its id.

    Raises:
        UsageError: the address has another form, or is not in this workspace.
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
            return locate(behind, lambda _: None)  # an asset is not made of other ones
    parts = urlsplit(address)
    if parts.hostname == StorageAccount.blob_host:
        container, _, path = unquote(parts.path).strip("/").partition("/")
        return Location(container, path.strip("/"))
    raise UsageError(
        f"The address {address!r} is not in the local workspace. Use a local path, which is uploaded, or "
        "azureml://datastores/workspaceblobstore/paths/<path>."
    )
