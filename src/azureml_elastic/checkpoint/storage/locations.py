"""Paths and URLs of folders of checkpoints, and the storage that serves each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from azureml_elastic.checkpoint.storage.storage import Storage  # which needs the packages of a node


def is_remote(where: str) -> bool:
    """Return whether a location is a URL of an object store, such as ``abfs://…``, not a folder of this machine."""
    return "://" in where and not where.startswith("file://")


def join_path(where: str, name: str) -> str:
    """Return the path or URL of ``name`` below ``where``."""
    return f"{where.rstrip('/')}/{name}" if is_remote(where) else str(Path(where) / name)


def open_storage(where: str | Path) -> Storage:
    """Return the storage of a path or an fsspec URL. Reads and creates nothing.

    Raises:
        MissingExtra: the packages for this kind of URL are not installed.
        UsageError: the name is empty, or no package knows this kind of URL.
    """
    if not str(where).strip().removeprefix("file://"):
        raise UsageError(
            f"The checkpoint folder {str(where)!r} has no name. Give CheckpointPolicy(path=...) the path of a folder, "
            "or None for the default."
        )
    if is_remote(str(where)):
        from azureml_elastic.checkpoint.storage.remote import RemoteStorage

        return RemoteStorage(str(where))
    from azureml_elastic.checkpoint.storage.local import LocalStorage

    return LocalStorage(Path(str(where).removeprefix("file://")))
