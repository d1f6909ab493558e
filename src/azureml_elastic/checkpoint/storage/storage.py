"""Where checkpoints are kept: what is asked of a place, and which one a path names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

__all__ = ["FileSum", "Storage"]


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and xxh3_128 checksum of one file.

    xxh3 runs at the speed of memory on any processor with vector instructions; it guards against what storage and
    networks do, not against forgers.
    """

    size: int
    xxh3: str


class Storage(ABC):
    """A run's checkpoints, one folder each. Thread-safe. Every method may raise ``OSError``."""

    @abstractmethod
    def __str__(self) -> str:
        """Return where it is."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """Make a checkpoint's folder, unless it is there."""

    @abstractmethod
    def write(self, folder: str, name: str, blocks: Iterable[bytes | memoryview]) -> FileSum:
        """Write a file that is not there yet, durably. Readers must check it: a crash may leave a part of it.

        Args:
            folder: that is there.
            name: of the file.
            blocks: its content.

        Raises:
            OSError: it could not be written; nothing of it is left, if the storage lets it be removed.
        """

    @abstractmethod
    def publish(self, folder: str, name: str, content: bytes) -> None:
        """Write the file that makes a folder a checkpoint: the name of the folder is durable as well."""

    @abstractmethod
    def replace(self, name: str, content: bytes) -> None:
        """Replace a file beside the folders, by one writer: readers see the old or the new content."""

    @abstractmethod
    def read(self, folder: str, name: str) -> bytes:
        """Return a file's content.

        Args:
            folder: ``""`` for a file beside the folders.
            name: of the file.

        Raises:
            FileNotFoundError: it is not there.
        """

    @abstractmethod
    def reading(self, folder: str, name: str) -> AbstractContextManager[Callable[[int, memoryview], None]]:
        """Give a function that fills memory from a byte of the file on.

        Raises:
            OSError: it cannot be read, or ends too early.
        """

    @abstractmethod
    def size(self, folder: str, name: str) -> int | None:
        """Return the size of a file in bytes, ``None`` where there is none."""

    @abstractmethod
    def problem(self, folder: str, name: str, expected: FileSum) -> str | None:
        """Return what is wrong with a file, every byte of it read; ``None`` where nothing is."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders that are there, sorted."""

    @abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """Return the size of each file of a folder, in bytes; nothing where there is no such folder."""

    @abstractmethod
    def remove(self, folder: str, first: str) -> None:
        """Remove a folder as far as the storage lets it.

        Args:
            folder: its name.
            first: the file that makes it a checkpoint; goes before all others.

        Raises:
            OSError: that file cannot be removed, so nothing was.
        """
