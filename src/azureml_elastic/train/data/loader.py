"""The base of the elastic data loaders: each sample is trained once an epoch at any sequence of world sizes.

An iteration yields one micro-batch of this rank. The position in the data advances only when ``run.commit()`` counts
the step, so batches that worker processes have prefetched do not count until they are trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from azureml_elastic.checkpoint.state.random_state import seed_of
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Position
from azureml_elastic.train.data.sampling import Cursor

__all__ = ["ElasticLoader", "require_foreign", "to_device"]

_OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last")


class ElasticLoader(ABC):
    """Iterable over this rank's batches, from the position in the data to the end of the epoch.

    Args:
        spec: properties of the data that must not change over restarts
        state: position of this loader
        position: position of the run
        device: device that the tensors of a batch are moved to
    """

    def __init__(self, spec: Any, state: LoaderState, position: Position, device: torch.device) -> None:
        self.spec = spec
        self._state = state
        self._position = position
        self._device = device
        self._generator = torch.Generator()
        self._last_epoch: int | None = None  # of the last batch that was yielded

    @property
    def name(self) -> str:
        """Name of the loader within the run."""
        return self._state.name

    @property
    def over(self) -> bool:
        """Whether the current epoch is known to have no more batches."""
        return bool(self.spec.over(self._state.cursor))

    @abstractmethod
    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from the cursor to the end of the epoch, with their collated samples."""

    @abstractmethod
    def filler(self) -> Any:
        """Return a collated batch of one or two samples of the data set, for a step that is discarded."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            UsageError: ``run.commit()`` was not called after the last batch.
        """
        position, state = self._position, self._state
        state.open = None  # an epoch that was left in the middle of a step
        if not position.in_epochs and self.over:
            state.cursor = Cursor(state.cursor.epoch + 1)
        epoch, resumed, again = state.cursor.epoch, state.cursor.consumed > 0, True
        while again and state.cursor.epoch == epoch:
            again, generation = False, position.generation
            # torch seeds its workers from here, so the script's own random numbers do not depend on restarts.
            where = (state.cursor.epoch, state.cursor.consumed)
            self._generator.manual_seed(seed_of(self.spec.seed, *where, position.identity.rank))
            for micro, batch in self.batches():
                if micro.index == 0 and position.epoch_ending and generation == position.generation:
                    position.when_continued()
                if generation != position.generation:
                    break  # the round has changed while the batch was fetched
                position.take(state, micro)
                self._last_epoch = epoch
                yield to_device(batch, self._device)
                dropped = micro.last and state.open is None and state.cursor != micro.window.after
                if dropped or generation != position.generation:
                    position.require_committed(state)
                    again = True
                    break
            again = again or generation != position.generation
        position.require_committed(state)
        if resumed and position.in_epochs and self._last_epoch != epoch:
            yield self._discarded_batch(epoch)
            position.require_committed(state)

    def _discarded_batch(self, epoch: int) -> Any:
        """Open a step that is discarded, and return its batch.

        The run has resumed after the epoch's last step. The loop's body runs once, so that its variables are set for
        the code after the loop, which has not run; nothing is trained.
        """
        self._last_epoch = epoch
        batch = self.filler()
        self._position.repeat(self._state)
        return to_device(batch, self._device)


def require_foreign(options: Mapping[str, Any]) -> None:
    """Check that no option of a ``DataLoader`` is one that an elastic loader sets itself.

    Raises:
        UsageError: one is.
    """
    ours = sorted(set(options) & set(_OURS))
    if ours:
        raise UsageError(
            f"run.loader() sets {', '.join(ours)} itself, from global_batch_size, micro_batch_size, shuffle and "
            "drop_last; remove the DataLoader argument."
        )


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
