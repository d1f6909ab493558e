"""The interface of a storage of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

__all__ = ["FileSum", "Storage"]


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and xxh3_128 checksum of a file.

    xxh3 runs at the speed of memory on processors with vector instructions. It detects damage, not forgery.
    """

    size: int
    xxh3: str


class Storage(ABC):
    """Storage of a run's checkpoints, one folder each. Thread-safe. Every method may raise ``OSError``."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the path or URL."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """Create a checkpoint's folder, unless it exists."""

    @abstractmethod
    def write(self, folder: str, name: str, blocks: Iterable[bytes | memoryview]) -> FileSum:
        """Write a new file durably. A crash may leave a part of it, so readers must verify it.

        Args:
            folder: name of an existing folder.
            name: name of the file.
            blocks: content.

        Raises:
            OSError: it could not be written, or exists; a part of it is removed as far as the storage allows.
        """

    @abstractmethod
    def publish(self, folder: str, name: str, content: bytes) -> None:
        """Write the file that makes a folder a checkpoint; the name of the folder becomes durable as well."""

    @abstractmethod
    def replace(self, name: str, content: bytes) -> None:
        """Replace a file beside the folders atomically. For a single writer."""

    @abstractmethod
    def read(self, folder: str, name: str) -> bytes:
        """Return a file's content.

        Args:
            folder: name of the folder, ``""`` for a file beside the folders.
            name: name of the file.

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

    @abstractmethod
    def problem(self, folder: str, name: str, expected: FileSum) -> str | None:
        """Return how a file differs from what is expected, ``None`` where it does not. Reads every byte."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the sorted names of the folders."""

    @abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """Return the size of each file of a folder in bytes; empty where there is no such folder."""

    @abstractmethod
    def remove(self, folder: str, first: str) -> None:
        """Remove a folder as far as the storage allows.

        Args:
            folder: name of the folder.
            first: name of the file that makes it a checkpoint; removed before all others.

        Raises:
            OSError: this file cannot be removed; the others were left.
        """
