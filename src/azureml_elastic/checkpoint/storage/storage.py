"""The interface of a storage of checkpoints, and how files are written and verified in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import xxhash

BLOCK_BYTES = 1 << 23
"""Size of the pieces that are read and written."""


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and xxh3_128 checksum of a file.

    xxh3 runs at the speed of memory on processors with vector instructions. It detects damage, not forgery.
    """

    size: int
    xxh3: str


class Storage(ABC):
    """Storage of a run's checkpoints, one folder each. Thread-safe.

    Every method but :meth:`prepare` may raise ``OSError``.

    Files beside the folders are in the folder ``""``.
    """

    @abstractmethod
    def __str__(self) -> str:
        """Return the path or URL."""

    @abstractmethod
    def prepare(self) -> None:
        """Create what a storage needs before its first checkpoint, and check that files can be created in it.

        Raises:
            UsageError: the location is impossible, or this user may not write to it.
            CheckpointError: it cannot be used for another reason.
        """

    @abstractmethod
    def make(self, folder: str) -> None:
        """Create a checkpoint's folder, unless it exists."""

    def write(self, folder: str, name: str, blocks: Iterable[bytes | memoryview]) -> FileSum:
        """Write a new file durably to an existing folder. A crash may leave a part of it, so readers must verify it.

        Raises:
            OSError: it could not be written, or exists; a part of it is removed as far as the storage allows.
        """
        digest, size = xxhash.xxh3_128(), 0
        with self.writing(folder, name) as write:
            for block in blocks:
                view = memoryview(block).cast("B")
                for begin in range(0, len(view), BLOCK_BYTES):
                    part = view[begin : begin + BLOCK_BYTES]
                    digest.update(part)
                    write(part)
                    size += len(part)
        return FileSum(size, digest.hexdigest())

    @abstractmethod
    def writing(self, folder: str, name: str) -> AbstractContextManager[Callable[[memoryview], None]]:
        """Create a file, and return a function that appends to it; see :meth:`write`."""

    def publish(self, folder: str, name: str, content: bytes) -> None:
        """Write the file that makes a folder a checkpoint; the name of the folder becomes durable as well."""
        self.write(folder, name, [content])

    @abstractmethod
    def replace(self, name: str, content: bytes) -> None:
        """Replace a file beside the folders atomically. For a single writer."""

    @abstractmethod
    def read(self, folder: str, name: str) -> bytes:
        """Return a file's content.

        Raises:
            FileNotFoundError: the file does not exist.
        """

    @abstractmethod
    def reading(self, folder: str, name: str) -> AbstractContextManager[Callable[[int, memoryview], None]]:
        """Open a file, and return a function that fills memory with its content from an offset on.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """

    @abstractmethod
    def size(self, folder: str, name: str) -> int | None:
        """Return the size of a file in bytes, ``None`` where it does not exist."""

    def problem(self, folder: str, name: str, expected: FileSum) -> str | None:
        """Return how a file differs from what is expected, ``None`` where it does not. Reads every byte."""
        path, digest = f"{self}/{folder}/{name}", xxhash.xxh3_128()
        block = memoryview(bytearray(min(BLOCK_BYTES, expected.size)))
        try:
            with self.reading(folder, name) as fill:
                # A longer file would have the right checksum as far as it is read.
                if (size := self.size(folder, name)) != expected.size:
                    return f"{path} has {size or 0} bytes instead of {expected.size}"
                for begin in range(0, expected.size, BLOCK_BYTES):
                    part = block[: expected.size - begin]
                    fill(begin, part)
                    digest.update(part)
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return None if digest.hexdigest() == expected.xxh3 else f"{path} has another checksum than when it was written"

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the sorted names of the folders."""

    @abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """Return the size of each file of a folder in bytes; empty where there is no such folder."""

    @abstractmethod
    def remove(self, folder: str, first: str) -> None:
        """Remove a folder as far as the storage allows, the file that makes it a checkpoint before all others.

        Raises:
            OSError: this file cannot be removed; the others were left.
        """
