"""A data loader whose length is the same at any world size, for training stacks that count steps by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from azureml_elastic.train.data.map_loader import MapLoader
from azureml_elastic.train.data.position import MicroBatch
from azureml_elastic.train.data.sampling import Cursor

__all__ = ["WindowLoader", "loader_options"]


class WindowLoader:
    """Iterable over this rank's micro-batches; the number of windows of an epoch does not depend on the world size.

    An iteration begins at the position in the data. Its length is that of a whole epoch nevertheless: stacks compute
    their position in an epoch from the number of steps, and skip what is trained.

    Attributes:
        micro_batches: micro-batches of each window, on every rank
        untrained: micro-batches that were yielded and not trained yet
        closed: whether iterations yield nothing, because the training is complete
    """

    _is_accelerate_prepared = True  # accelerate divides other loaders among the ranks

    def __init__(self, loader: MapLoader, dataset: Any) -> None:
        self._loader = loader
        self.dataset = dataset
        self.micro_batches = loader.micro_batches
        self.batch_size = loader.micro_batch_size
        self.untrained: deque[MicroBatch] = deque()
        self.closed = False
        self._begin: Cursor | None = None  # of an iteration that has passed over windows

    def __len__(self) -> int:
        """Return the number of micro-batches of a whole epoch."""
        return self._loader.steps_per_epoch * self.micro_batches

    @property
    def largest(self) -> int:
        """Number of samples of the largest micro-batch."""
        return self._loader.largest_micro_batch

    def repeat(self) -> Any:
        """Return this rank's last batch of the step before the position."""
        return self._loader.repeat()

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the session has the position. Stacks take loaders with this method for resumable ones."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def filler(self) -> Any:
        """Return a batch of one or two samples, for a step that is not trained."""
        return self._loader.filler()

    def batches_from(self, cursor: Cursor) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from another position to the end of its epoch, without moving the run's."""
        return self._loader.batches_from(cursor)

    def cursor_at(self, epoch: int, window: int) -> Cursor:
        """Return the position before a window, at the reference world size."""
        return Cursor(epoch, window * self._loader.global_batch_size)

    def pass_over(self) -> None:
        """Go on after the current window, which the script has not trained: for this iteration alone."""
        if self._begin is None:
            self._begin = self._loader.cursor
        self._loader.pass_over()

    def end_pass(self, *, trained: bool) -> None:
        """Leave an iteration; return to its beginning, unless the script has trained one of its batches."""
        self.untrained.clear()
        begin, self._begin = self._begin, None
        if not trained:
            self._loader.leave()
            if begin is not None:
                self._loader.cursor = begin

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the epoch."""
        self.untrained.clear()
        if self.closed:
            return
        for batch in self._loader:
            micro = self._loader.current
            assert micro is not None
            if micro.index == 0:
                self.untrained.clear()
            self.untrained.append(micro)
            yield batch


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a ``DataLoader`` besides those that select samples."""
    options = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
    return options
