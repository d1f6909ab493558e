"""The storage account's blobs as files, for mounts and downloads of the nodes.

A real mount needs privileges that a test lacks. Here a mount is a folder shared by all nodes, so that one node's writes
are immediately visible to the others; it is uploaded to the blobs when a job ends.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobProperties

from azureml_elastic.testing.storage.account import StorageAccount
from azureml_elastic.testing.storage.locations import Location

__all__ = ["Mirror"]

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
        files = {location: root} if root.is_file() else _below(root, location)
        with self._lock, self._storage.container(location.container) as client:
            for found, path in files.items():
                with contextlib.suppress(FileNotFoundError):  # running nodes may delete it meanwhile
                    mark = _mark(path)
                    if source is None and self._written.get(found) == mark:
                        continue
                    answer = client.upload_blob(found.path, path.read_bytes(), overwrite=True)
                    if source is None:
                        self._written[found] = mark
                        self._tags[found] = _tag(answer.get_blob_properties())
            if source is None:
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


def _below(folder: Path, location: Location) -> dict[Location, Path]:
    return {
        location / path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
