"""Messages for local folders that cannot hold checkpoints."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from azureml_elastic.errors import CheckpointError, UsageError

__all__ = ["OUT_OF_SPACE", "unusable"]

OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a file system that is full, or of a user whose quota is used up."""

_NO_FOLDER = frozenset({errno.EEXIST, errno.ENOTDIR})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_IMPOSSIBLE = frozenset({errno.ENOENT, errno.EINVAL, errno.ELOOP})

_ANOTHER = "choose another checkpoint folder"
_SHOWN_CHARACTERS = 200


def unusable(folder: Path, error: OSError | ValueError) -> UsageError | CheckpointError:
    """Return the error for a folder that could not be created, or in which no file could be created.

    Args:
        folder: folder of the checkpoints.
        error: error of the operating system; a ``ValueError`` for a path that no operating system takes.
    """
    begin = f"The checkpoint folder {_shown(folder)} cannot be used: "
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number in _NO_FOLDER:
        return UsageError(f"{begin}{_shown(_file_in_place(folder))} is not a folder. Remove it, or {_ANOTHER}.")
    if number == errno.ENAMETOOLONG:
        longest = max(len(os.fsencode(part)) for part in folder.parts)
        return UsageError(
            f"{begin}the path has {len(os.fsencode(folder)):,} bytes and its longest name {longest:,}; most file "
            f"systems take 4,095 and 255. Shorten it, or {_ANOTHER}."
        )
    if number in _FORBIDDEN:
        return UsageError(
            f"{begin}the user with id {os.geteuid()} may not create files in {_shown(_nearest(folder))}. Give this "
            f"user write permission, or {_ANOTHER}."
        )
    if number == errno.EROFS:
        return UsageError(
            f"{begin}the file system of {_shown(_nearest(folder))} is read-only. Mount it for writing (in an Azure ML "
            f"job: an output with the mode rw_mount), or {_ANOTHER}."
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if number in _IMPOSSIBLE:
        return UsageError(f"{begin}nothing can be created there ({reason}). Correct it, or {_ANOTHER}.")
    return CheckpointError(f"{begin}{reason}. Repair the disk or the mount, or {_ANOTHER}.")


def _nearest(folder: Path) -> Path:
    """Return the folder itself, or the nearest of its parents that exists."""
    return next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)


def _file_in_place(folder: Path) -> Path:
    existing = (path for path in (*reversed(folder.parents), folder) if os.path.lexists(path))
    return next((path for path in existing if not os.path.isdir(path)), folder)  # noqa: PTH112 - raises no error


def _shown(path: Path) -> str:
    text = repr(str(path))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
