"""Checkpoints in an object store without a mount, through fsspec.

For Azure, ``abfs://container@account.dfs.core.windows.net/path`` and ``az://`` are served by adlfs, with the node's
identity, a connection string in ``AZURE_STORAGE_CONNECTION_STRING`` or a key in ``AZURE_STORAGE_ACCOUNT_KEY``. Uploads
are atomic, and visible to every later read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from azureml_elastic.checkpoint.storage.storage import BLOCK_BYTES, Storage
from azureml_elastic.environment.process import Environment
from azureml_elastic.errors import MissingExtra, UsageError


def is_azure(where: str) -> bool:
    """Return whether a location is a URL that adlfs serves."""
    return where.startswith(("abfs://", "abfss://", "az://"))


class RemoteStorage(Storage):
    """A prefix of URLs in an object store.

    Raises:
        MissingExtra: fsspec, or its package for this kind of URL, is not installed.
        UsageError: fsspec does not know this kind of URL, or refuses its parts.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(self._url, **_options(url))
        except ImportError as error:
            raise MissingExtra(error.name or "adlfs", "blob") from error
        except ValueError as error:
            raise UsageError(
                f"The checkpoint URL {self._url!r} cannot be used: {error}. Give CheckpointPolicy(path=...) a "
                "folder, or a URL such as abfs://container@account.dfs.core.windows.net/path."
            ) from error

    def __str__(self) -> str:
        return self._url

    @override
    def prepare(self) -> None:
        pass  # permissions appear with the first call, which track() makes before training

    @override
    def make(self, folder: str) -> None:
        pass  # a folder is a part of its files' names

    @override
    @contextlib.contextmanager
    def writing(self, folder: str, name: str) -> Iterator[Callable[[memoryview], None]]:
        with self._at(folder, name) as path:
            stream = self._files.open(path, "xb", block_size=BLOCK_BYTES)
            try:
                yield lambda block: stream.write(bytes(block))
                stream.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    stream.discard()
                stream.closed = True  # its finalizer would upload the partial content otherwise
                raise

    @override
    def replace(self, name: str, content: bytes) -> None:
        with self._at("", name) as path:
            self._files.pipe_file(path, content)

    @override
    def read(self, folder: str, name: str) -> bytes:
        with self._at(folder, name) as path:
            content: bytes = self._files.cat_file(path)
        return content

    @override
    @contextlib.contextmanager
    def reading(self, folder: str, name: str) -> Iterator[Callable[[int, memoryview], None]]:
        def fill(begin: int, memory: memoryview) -> None:
            for done in range(0, len(memory), BLOCK_BYTES):
                part = memory[done : done + BLOCK_BYTES]
                with self._at(folder, name) as path:
                    content = self._files.cat_file(path, start=begin + done, end=begin + done + len(part))
                if len(content) != len(part):
                    raise OSError(f"{path} ends at byte {begin + done + len(content)}")
                part[:] = content

        yield fill

    @override
    def size(self, folder: str, name: str) -> int | None:
        self._files.invalidate_cache()  # or fsspec would not look at what other nodes have written since
        try:
            with self._at(folder, name) as path:
                return int(self._files.info(path)["size"])
        except OSError:
            return None

    @override
    def folders(self) -> list[str]:
        return sorted(name for name, entry in self._list("").items() if entry["type"] == "directory")

    @override
    def files(self, folder: str) -> dict[str, int]:
        return {name: int(entry["size"]) for name, entry in self._list(folder).items() if entry["type"] == "file"}

    @override
    def remove(self, folder: str, first: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._at(folder, first) as path:
            self._files.rm_file(path)
        with contextlib.suppress(OSError):
            for name in self.files(folder):
                with self._at(folder, name) as path:
                    self._files.rm_file(path)

    def _list(self, folder: str) -> dict[str, dict[str, Any]]:
        self._files.invalidate_cache()
        try:
            with self._at(folder, "") as path:
                found = self._files.ls(path, detail=True)
        except FileNotFoundError:  # stores have no folders, so that one without files does not exist
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}

    @contextlib.contextmanager
    def _at(self, folder: str, name: str) -> Iterator[str]:
        """Return the path of a file or folder in the store, and map the errors of the store's client to ``OSError``."""
        path = "/".join(part for part in (self._root.rstrip("/"), folder, name) if part)
        try:
            yield path
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def _options(url: str) -> dict[str, Any]:
    """Return the options that select the node's identity, where neither a key nor a connection string is set."""
    if not is_azure(url) or Environment.read().has_storage_credential:
        return {}
    return {"anon": False}  # selects DefaultAzureCredential in adlfs
