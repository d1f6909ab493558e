"""A lack of file descriptors in the process of the tests."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["no_free_descriptor"]


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[Callable[[int], None]]:
    """Take all of this process's descriptors; yields a function that frees a number of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def free(count: int) -> None:
        for _ in range(count):
            os.close(taken.pop())

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, _open())) + 64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield free
    finally:
        free(len(taken))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _open() -> list[str]:
    return [path.name for path in Path("/proc/self/fd").iterdir()]
