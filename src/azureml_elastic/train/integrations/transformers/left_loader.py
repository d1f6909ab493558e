"""A loader whose data transformers divides among the ranks, since they cannot be divided by their index.

The run keeps its position in them: the number of batches that all ranks have trained in the epoch. transformers and
accelerate give the ranks batch after batch of one sequence in turn, so that another number of ranks continues there.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class LeftLoader:
    """The loader, from the run's position in the epoch on.

    Args:
        loader: loader of this rank's batches
        ranks: number of ranks
        full: number of ranks of a run with all nodes
        accumulation: batches of a rank in a step of that run
        keep_count: whether the trainer counts on that number in a smaller run too

    Attributes:
        epoch: epoch of the current or next iteration
        trained: batches of it that all ranks together have trained
        accumulation: batches of a rank in a step
        changes: whether the run may have more ranks than this round
        closed: whether iterations yield nothing, because the training is complete
    """

    _is_accelerate_prepared = True  # accelerate would divide it once more

    def __init__(self, loader: Any, *, ranks: int, full: int, accumulation: int, keep_count: bool) -> None:
        self._loader = loader
        self._ranks = ranks
        self._full_step = accumulation * full
        self.changes = ranks != full
        # No sample is left out: where the ranks cannot share the batches of a step evenly, it has some more.
        self.accumulation = accumulation if keep_count else math.ceil(self._full_step / ranks)
        self.epoch = 0
        self.trained = 0
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader."""
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        """Return the number of this rank's batches of a whole epoch."""
        return len(self._loader)

    @property
    def full_steps(self) -> int:
        """Steps of an epoch of a run with all nodes."""
        return max(1, math.ceil(len(self._loader) * self._ranks / self._full_step))

    @property
    def ended(self) -> bool:
        """Whether the epoch is known to have no more batches."""
        try:
            return self.trained // self._ranks >= len(self._loader)
        except TypeError:  # without a length
            return False

    def begin_at(self, epoch: int, trained: int) -> None:
        """Set the position."""
        self.epoch, self.trained = epoch, trained

    def end_epoch(self) -> None:
        """Go on with the next epoch."""
        self.begin_at(self.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the trainer does not know the epoch of data without a length."""

    def count(self) -> None:
        """Count a batch of each rank as trained."""
        self.trained += self._ranks

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from the position on."""
        if self.closed:
            return iter(())
        loader = self._loader
        inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for each in (loader, inner):
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)
        behind = self.trained // self._ranks
        self.trained = behind * self._ranks
        if behind and isinstance(loader, DataLoader):
            skip = importlib.import_module("accelerate.data_loader").skip_first_batches  # which transformers needs
            loader, behind = skip(loader, behind), 0
        return itertools.islice(iter(loader), behind, None)
