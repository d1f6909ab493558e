"""A lack of file descriptors in the process of the tests."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


class TakenDescriptors:
    """Descriptors of this process that nobody else in it can have."""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def fill(self) -> None:
        """Take all free descriptors, those too that other threads have closed since."""
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(os.dup(0))

    def free(self, count: int | None = None) -> None:
        """Free a number of descriptors, by default all."""
        for _ in range(len(self._taken) if count is None else count):
            os.close(self._taken.pop())


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[TakenDescriptors]:
    """Take all of this process's descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = TakenDescriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, _open())) + 64, hard))
    try:
        taken.fill()
        yield taken
    finally:
        taken.free()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _open() -> list[str]:
    return [path.name for path in Path("/proc/self/fd").iterdir()]
