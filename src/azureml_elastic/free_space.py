"""Free space on the disk of a file or folder."""

from __future__ import annotations

import os
from pathlib import Path

_FULL_BYTES = 1 << 16
"""Free space below which nothing of use can be written."""


def free_bytes(path: Path) -> int | None:
    """Return the free bytes for this user where the path is, or will be; ``None`` where the file system tells no size.

    Raises:
        OSError: the file system does not answer.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    space = os.statvfs(there)  # f_bavail, not f_bfree: a part is for the system's administrator alone
    return space.f_bavail * space.f_frsize if space.f_blocks else None


def is_full(path: Path) -> bool:
    """Return whether the disk of the path is full, as far as the file system tells."""
    try:
        free = free_bytes(path)
    except OSError:
        return False
    return free is not None and free < _FULL_BYTES
