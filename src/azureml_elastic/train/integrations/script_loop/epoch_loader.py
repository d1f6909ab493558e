"""The data loader that a script iterates over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

__all__ = ["EpochLoader", "Passes"]


class Passes(Protocol):
    """The loop whose passes over the training data a loader begins."""

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch at the reference world size."""

    def batches(self) -> Iterator[Any]:
        """Yield the batches of a pass over the training data."""

    def expect(self, epoch: int) -> None:
        """Take the epoch of the next pass, where the script says so."""


class EpochLoader:
    """Iterable over this rank's micro-batches of an epoch that are not trained yet.

    Its length is that of a whole epoch at the reference world size: scripts compute numbers of optimizer steps by it.

    Args:
        loader: loader of the script, whose other attributes this one has too
        passes: loop
    """

    _is_accelerate_prepared = True

    def __init__(self, loader: Any, passes: Passes) -> None:
        self._loader = loader
        self._passes = passes

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch at the reference world size."""
        return self._passes.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the epoch."""
        return self._passes.batches()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's loader."""
        return getattr(self.__dict__["_loader"], name)

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch of the next iteration."""
        self._passes.expect(epoch)
