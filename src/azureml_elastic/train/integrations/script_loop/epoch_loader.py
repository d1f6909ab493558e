"""The data loader that a script iterates over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["EpochLoader"]


class EpochLoader:
    """Iterable over this rank's micro-batches of an epoch that are not trained yet.

    Its length is that of a whole epoch at the reference world size: scripts compute numbers of optimizer steps by it.
    An iteration may have more batches, where a window has more micro-batches than the script accumulates.

    Args:
        loader: loader of the script, whose other attributes this one has too
        length: number of batches of an epoch at the reference world size
        batches: function that begins an iteration
        begin_at: function that takes the epoch of the next iteration, where the script says so
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        loader: Any,
        length: int,
        batches: Callable[[], Iterator[Any]],
        begin_at: Callable[[int], None],
    ) -> None:
        self._loader = loader
        self._length = length
        self._batches = batches
        self._begin_at = begin_at

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch at the reference world size."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the epoch."""
        return self._batches()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's loader."""
        return getattr(self.__dict__["_loader"], name)

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch of the next iteration."""
        self._begin_at(epoch)
