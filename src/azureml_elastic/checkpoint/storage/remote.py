"""Checkpoints in an object store without a mount, through fsspec.

For Azure, ``abfs://container@account.dfs.core.windows.net/path`` and ``az://`` are served by adlfs, with the node's
identity, a connection string in ``AZURE_STORAGE_CONNECTION_STRING`` or a key in ``AZURE_STORAGE_ACCOUNT_KEY``. Uploads
are atomic, and visible to every later read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import xxhash

from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.errors import MissingExtra

__all__ = ["RemoteStorage"]

_BLOCK = 1 << 23
_AZURE = ("abfs", "abfss", "az")


class RemoteStorage(Storage):
    """A prefix in an object store.

    Args:
        url: URL of the prefix.
        options: options of the fsspec file system; ``None`` takes credentials from the environment.

    Raises:
        MissingExtra: fsspec, or its package for this kind of URL, is not installed.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self._url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(self._url, **(_options(url) if options is None else options))
        except ImportError as error:
            raise MissingExtra(error.name or "adlfs", "blob") from error

    def __str__(self) -> str:
        """Return the URL."""
        return self._url

    def make(self, folder: str) -> None:
        """Do nothing: a folder is a part of its files' names."""

    def write(self, folder: str, name: str, blocks: Iterable[bytes | memoryview]) -> FileSum:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        path = self._path(folder, name)
        with _as_os_errors(path):
            return self._upload(path, blocks)

    def _upload(self, path: str, blocks: Iterable[bytes | memoryview]) -> FileSum:
        digest = xxhash.xxh3_128()
        size = 0
        stream = self._files.open(path, "xb", block_size=_BLOCK)
        try:
            for block in blocks:
                view = memoryview(block).cast("B")
                for begin in range(0, len(view), _BLOCK):
                    part = view[begin : begin + _BLOCK]
                    digest.update(part)
                    size += len(part)
                    stream.write(bytes(part))
            stream.close()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.discard()
            stream.closed = True  # its finalizer would upload the partial content otherwise
            raise
        return FileSum(size, digest.hexdigest())

    def publish(self, folder: str, name: str, content: bytes) -> None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        self.write(folder, name, [content])

    def replace(self, name: str, content: bytes) -> None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        with _as_os_errors(self._path("", name)):
            self._files.pipe_file(self._path("", name), content)

    def read(self, folder: str, name: str) -> bytes:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        with _as_os_errors(self._path(folder, name)):
            content: bytes = self._files.cat_file(self._path(folder, name))
        return content

    @contextlib.contextmanager
    def reading(self, folder: str, name: str) -> Iterator[Callable[[int, memoryview], None]]:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        path = self._path(folder, name)

        def fill(begin: int, memory: memoryview) -> None:
            for done in range(0, len(memory), _BLOCK):
                part = memory[done : done + _BLOCK]
                with _as_os_errors(path):
                    content = self._files.cat_file(path, start=begin + done, end=begin + done + len(part))
                if len(content) != len(part):
                    raise OSError(f"{path} ends at byte {begin + done + len(content)}")
                part[:] = content

        yield fill

    def size(self, folder: str, name: str) -> int | None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        self._files.invalidate_cache()
        try:
            with _as_os_errors(self._path(folder, name)):
                return int(self._files.info(self._path(folder, name))["size"])
        except OSError:
            return None

    def problem(self, folder: str, name: str, expected: FileSum) -> str | None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        path = self._path(folder, name)
        try:
            size = self.size(folder, name)
            if size != expected.size:
                return f"{path} has {size} bytes instead of {expected.size}"
            digest = xxhash.xxh3_128()
            for begin in range(0, expected.size, _BLOCK):
                with _as_os_errors(path):
                    digest.update(self._files.cat_file(path, start=begin, end=min(begin + _BLOCK, expected.size)))
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return None if digest.hexdigest() == expected.xxh3 else f"{path} has another checksum than when it was written"

    def folders(self) -> list[str]:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        return sorted(name for name, entry in self._list(self._root).items() if entry["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        listed = self._list(self._path(folder, ""))
        return {name: int(entry["size"]) for name, entry in listed.items() if entry["type"] == "file"}

    def remove(self, folder: str, first: str) -> None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        with contextlib.suppress(FileNotFoundError), _as_os_errors(self._path(folder, first)):
            self._files.rm_file(self._path(folder, first))
        with contextlib.suppress(OSError), _as_os_errors(self._path(folder, "")):
            for name in self.files(folder):
                self._files.rm_file(self._path(folder, name))

    def _list(self, path: str) -> dict[str, dict[str, Any]]:
        self._files.invalidate_cache()
        try:
            with _as_os_errors(path):
                found = self._files.ls(path.rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}

    def _path(self, folder: str, name: str) -> str:
        return "/".join(part for part in (self._root.rstrip("/"), folder, name) if part)


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """Map the errors of a store's client to ``OSError``."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def _options(url: str) -> dict[str, Any]:
    """Return the options that select the node's identity, where neither a key nor a connection string is set."""
    if url.partition("://")[0] not in _AZURE or any(
        os.environ.get(f"AZURE_STORAGE_{name}") for name in ("CONNECTION_STRING", "ACCOUNT_KEY", "SAS_TOKEN")
    ):
        return {}
    return {"anon": False}  # selects DefaultAzureCredential in adlfs
