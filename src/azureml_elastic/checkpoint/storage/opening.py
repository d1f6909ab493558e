"""The storage that serves the path or URL of a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

from azureml_elastic.checkpoint.storage.locations import is_remote
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.errors import UsageError

__all__ = ["open_storage"]


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
