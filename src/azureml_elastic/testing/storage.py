"""The storage account of the local workspace: emulators behind the hosts of Azure, locations in it, and mounts of it.

Requests with a signature are forwarded unchanged, and Azurite verifies it. In requests with a token, which Azurite
accepts over TLS only, the token is replaced by a signature.

Nodes see the account's blobs as files, by mounts and downloads. A real mount needs privileges that a test lacks. Here a
mount is a folder shared by all nodes, so that one node's writes are immediately visible to the others; it is uploaded
to the blobs when a job ends.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from http.client import HTTPConnection, HTTPException, InvalidURL
from pathlib import Path
from urllib.parse import unquote, urlsplit

from typing_extensions import Self

from azureml_elastic.errors import UsageError, needs_extra
from azureml_elastic.local.azurite import Azurite
from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string
from azureml_elastic.testing.messages import Answer, Request, refusal

with needs_extra("azure-data-tables", "node"):
    from azure.core.credentials import AzureNamedKeyCredential
    from azure.core.exceptions import ResourceNotFoundError
    from azure.data.tables import ResourceTypes as TableResources
    from azure.data.tables import generate_account_sas as table_account_sas
with needs_extra("azure-ai-ml", "submit"):
    from azure.storage.blob import BlobProperties, ContainerClient, generate_account_sas
    from azure.storage.blob import ResourceTypes as BlobResources


BLOBS = "azureml-blobstore"
"""Container of the default datastore."""

ARTIFACTS = "azureml"
"""Container of logs and of the runs' ``./outputs``."""

_VALID = timedelta(days=7)
_TIMEOUT_S = 60.0
_OF_THE_CONNECTION = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding"})


class StorageAccount:
    """A context manager that runs the storage account."""

    account = EMULATOR_ACCOUNT
    blob_host = f"{EMULATOR_ACCOUNT}.blob.core.windows.net"
    table_host = f"{EMULATOR_ACCOUNT}.table.core.windows.net"

    def __init__(self) -> None:
        self._blob = Azurite(service="blob")
        self._table = Azurite(service="table")
        self._stack = contextlib.ExitStack()
        parts = emulator_connection_string("http://127.0.0.1").split(";")
        self.key = dict(part.split("=", 1) for part in parts if part)["AccountKey"]
        expiry = datetime.now(timezone.utc) + _VALID
        everything = BlobResources(service=True, container=True, object=True)
        self.blob_signature = str(
            generate_account_sas(self.account, self.key, everything, "rwdlacup", expiry, protocol="https,http")
        )
        named = AzureNamedKeyCredential(self.account, self.key)
        self._table_signature = str(
            table_account_sas(named, TableResources.from_string("sco"), "rwdlacup", expiry, protocol="https,http")
        )

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            with ThreadPoolExecutor(2) as pool:
                # At once, as both wait for a process of Node.js.
                started = [pool.submit(stack.enter_context, service) for service in (self._blob, self._table)]
            for future in started:
                future.result()
            for name in (BLOBS, ARTIFACTS):
                self.make_container(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def table_endpoint(self) -> str:
        """Direct URL of the tables, for nodes that use no token."""
        return self._table.endpoint

    @property
    def hosts(self) -> dict[str, Callable[[Request], Answer]]:
        """Request handlers by host name."""
        return {
            self.blob_host: lambda request: _forward(request, self._blob.endpoint, self.blob_signature),
            self.table_host: lambda request: _forward(request, self._table.endpoint, self._table_signature),
        }

    def container(self, name: str) -> ContainerClient:
        """Return a client of a container; the caller closes it."""
        return ContainerClient.from_connection_string(self._blob.connection_string, name)

    def make_container(self, name: str) -> None:
        """Create a container unless it exists."""
        with self.container(name) as client:
            if not client.exists():
                client.create_container()


def _forward(request: Request, endpoint: str, signature: str) -> Answer:
    headers = {name: value for name, value in request.headers.items() if name not in _OF_THE_CONNECTION}
    target = request.target
    if headers.get("authorization", "").startswith("Bearer "):
        del headers["authorization"]
        target += f"{'&' if '?' in target else '?'}{signature}"
    headers["host"] = request.host
    try:
        with contextlib.closing(HTTPConnection(urlsplit(endpoint).netloc, timeout=_TIMEOUT_S)) as connection:
            connection.request(request.method, target, request.body or None, headers)
            response = connection.getresponse()
            body = response.read()
    except (InvalidURL, ValueError) as error:
        raise UsageError(f"The request cannot be forwarded: {error}.") from error
    except (OSError, HTTPException) as error:
        return refusal(502, "BadGateway", f"The emulator did not respond: {error!r}")
    # A HEAD response keeps the length of the body that is not sent.
    dropped = _OF_THE_CONNECTION | (set() if request.method == "HEAD" else {"content-length"})
    kept = tuple((name, value) for name, value in response.getheaders() if name.lower() not in dropped)
    return Answer(response.status, kept, body)


DATASTORES = {"workspaceblobstore": BLOBS, "workspaceartifactstore": ARTIFACTS}
"""Containers by datastore name."""

_DATASTORE = re.compile(r"azureml:/+(?:.*/)?datastores/([^/]+)/(?:paths/)?(.*)", re.IGNORECASE)
_ASSET = re.compile(r"(?:azureml:)?(/subscriptions/.*/(?:data|codes|models)/.*|//jobs/.*)", re.IGNORECASE)


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
        address: ``azureml://datastores/...`` in its short or long form, an asset id, an output of a job as in
            ``azureml://jobs/...``, or the URL of a blob.

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


_AT_ONCE = 8


class Mirror:
    """Local copy of the account's blobs in a folder; thread-safe."""

    def __init__(self, storage: StorageAccount, folder: Path) -> None:
        self._storage = storage
        self._folder = folder
        self._tags: dict[Location, str] = {}
        self._written: dict[Location, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def path(self, location: Location) -> Path:
        """Return the local path of a location, which need not exist."""
        return self._folder / location.container / location.path

    def bring(self, location: Location) -> Path:
        """Download new and changed blobs of a location, and return its local path.

        A file that a node has changed is kept unless its blob has changed too.
        """
        with self._lock, self._storage.container(location.container) as client:
            # One job at a time: two downloads of a file would write the same partial one.
            new = []
            with contextlib.suppress(ResourceNotFoundError):
                for blob in client.list_blobs(name_starts_with=location.path or None):
                    found = Location(location.container, str(blob.name))
                    within = found in location and not found.path.endswith("/")
                    if within and self._tags.get(found) != _tag(blob):
                        new.append((found, _tag(blob)))

            def fetch(item: tuple[Location, str]) -> None:
                found, tag = item
                path = self.path(found)
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{path.name}.part")
                part.write_bytes(client.download_blob(found.path).readall())
                part.replace(path)  # nodes never read a partial file
                self._tags[found] = tag
                self._written[found] = _mark(path)

            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(fetch, new))
        return self.path(location)

    def copy(self, location: Location, target: Path) -> None:
        """Copy the files of a location to a node; creates an empty folder if there are none."""
        source = self.bring(location)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        elif source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)

    def store(self, location: Location, source: Path | None = None) -> None:
        """Upload the mirror's changed files and delete the blobs of its deleted ones; or upload a node's files."""
        root = self.path(location) if source is None else source
        paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
        below = {location / path.relative_to(root).as_posix(): path for path in paths}
        files = {location: root} if root.is_file() else below
        with self._lock, self._storage.container(location.container) as client:
            for found, path in files.items():
                with contextlib.suppress(FileNotFoundError):  # running nodes may delete it meanwhile
                    mark = _mark(path)
                    if source is None and self._written.get(found) == mark:
                        continue
                    answer = client.upload_blob(found.path, path.read_bytes(), overwrite=True)
                    if source is None:
                        self._written[found] = mark
                        # What was uploaded here is not to be downloaded again.
                        self._tags[found] = _tag(answer.get_blob_properties())
            if source is None:
                # A file that a job has deleted or renamed is not to come back with the next download.
                for missing in [found for found in self._written if found in location and found not in files]:
                    del self._written[missing]
                    self._tags.pop(missing, None)
                    with contextlib.suppress(ResourceNotFoundError):
                        client.delete_blob(missing.path)


def _mark(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _tag(blob: BlobProperties) -> str:
    """Return a blob's etag without the quotes that headers have and listings do not."""
    return str(blob.etag).strip('"')
