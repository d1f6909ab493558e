"""Paths and URLs of folders of checkpoints."""

from __future__ import annotations

from pathlib import Path

__all__ = ["AZURE_CONNECTION_STRING", "is_azure", "is_remote", "join_path"]

AZURE_CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
"""The environment variable from which adlfs reads a connection string."""

_AZURE = ("abfs", "abfss", "az")


def is_azure(where: str) -> bool:
    """Return whether a location is a URL that adlfs serves."""
    return where.partition("://")[0] in _AZURE and is_remote(where)


def is_remote(where: str) -> bool:
    """Return whether a location is a URL of an object store, such as ``abfs://…``, not a folder of this machine."""
    return "://" in where and not where.startswith("file://")


def join_path(where: str, name: str) -> str:
    """Return the path or URL of ``name`` below ``where``."""
    return f"{where.rstrip('/')}/{name}" if is_remote(where) else str(Path(where) / name)
