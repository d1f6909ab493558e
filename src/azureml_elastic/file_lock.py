"""Exclusive locks of files (flock), which the kernel releases when the process that holds them ends in any way."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_RETRY_SECONDS = 0.02


def try_lock(path: Path, *, create: bool = True) -> int:
    """Return a descriptor that holds the lock of a file, -1 where another process holds it.

    Raises:
        OSError: the file does not exist (without ``create``), is a link, or cannot be opened or locked.
    """
    # Not through a link, which another user may have left in a shared folder.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lock(path: Path, seconds: float) -> int:
    """Return a descriptor that holds the lock of a file, which is created if missing.

    Raises:
        BlockingIOError: another process has held the lock for these seconds.
        OSError: the file cannot be opened or locked.
    """
    limit = time.monotonic() + seconds
    while (descriptor := try_lock(path)) < 0:
        if time.monotonic() >= limit:
            raise BlockingIOError(f"{path} is locked by another process")
        time.sleep(_RETRY_SECONDS)
    return descriptor


def is_abandoned(path: Path) -> bool:
    """Return whether a file exists that no process has locked."""
    try:
        descriptor = try_lock(path, create=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0
