"""Writing a file's pages to the disk while more of it is still being produced."""

from __future__ import annotations

import ctypes

__all__ = ["begin_writing"]

_SYNC_FILE_RANGE_WRITE = 2  # not among Python's names

_LIBC = ctypes.CDLL(None, use_errno=True)


def begin_writing(descriptor: int, begin: int, nbytes: int) -> None:
    """Have the kernel begin to write a part of a file to the disk, so that a later ``fsync`` waits for the rest alone.

    A hint: where the system or the file system has no such call, nothing happens, and ``fsync`` reports what failed.
    """
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None:
        call(
            ctypes.c_int(descriptor),
            ctypes.c_int64(begin),
            ctypes.c_int64(nbytes),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )
