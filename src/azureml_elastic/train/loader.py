"""The data loader that trains each sample once an epoch, whatever happens to the world size.

Each iteration yields this rank's share of one window, as one batch. The position advances only when ``run.step()``
commits, so batches that worker processes have prefetched do not count until they are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from azureml_elastic.errors import UsageError
from azureml_elastic.train.randomness import seed_of
from azureml_elastic.train.sampling import Cursor, DataSpec, order, share, weight

if TYPE_CHECKING:
    from azureml_elastic.train.agent import Identity

__all__ = ["ElasticLoader", "Position", "SizedDataset", "Window"]

_BLOCK_SAMPLES, _BLOCK_WINDOWS = 1 << 13, 1 << 8

_OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last")


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


@dataclass(frozen=True)
class Window:
    """What a rank trains in one optimizer step.

    Args:
        ids: dataset indices of the batch, at least one.
        own: how many of them count: all, or none where the window is smaller than the world and the batch is a
            stand-in, so that this rank takes part in the collectives.
        count: samples of the window over all ranks.
        after: the cursor once the step is committed.
        weight: of this rank's mean loss.
        epoch_size: samples that the whole epoch trains.
    """

    ids: tuple[int, ...]
    own: int
    count: int
    after: Cursor
    weight: float
    epoch_size: int


class Position:
    """Where the data stand: the cursor, and the window that is being trained.

    Args:
        identity: of this process.

    Attributes:
        cursor: how far the data are trained.
        open: the window at hand.
        in_epochs: whether ``run.epochs()`` counts the epochs.
        when_opened: called with each window before it is trained.
    """

    def __init__(self, identity: Identity) -> None:
        self.cursor = Cursor()
        self.open: Window | None = None
        self.in_epochs = False
        self.when_opened: Callable[[Window], None] = lambda _: None
        self.identity = identity
        self.generation = 0

    def enter(self, identity: Identity) -> None:
        """Go on with the ranks of another round, whose shares are others: what was fetched is of no use any more."""
        self.identity = identity
        self.generation += 1

    def take(self, window: Window) -> None:
        """Open a window.

        Raises:
            UsageError: the one before was not committed.
        """
        self.require_committed()
        self.open = window
        self.when_opened(window)

    def require_committed(self) -> None:
        """Check that no window is open.

        Raises:
            UsageError: one is.
        """
        if self.open is not None:
            raise UsageError(
                f"The loader was asked for the next batch, but run.step() was not called after the last one "
                f"(epoch {self.cursor.epoch}, sample {self.cursor.consumed}). Call run.step() after optimizer.step() "
                "in every iteration: it is what counts the samples as trained."
            )

    def commit(self) -> Window | None:
        """Count the open window as trained and return it."""
        window, self.open = self.open, None
        if window is not None:
            self.cursor = window.after
        return window


class _Windows:
    """The batch sampler: a rank's shares of the windows from the cursor to the epoch's end."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        for window in self._loader.windows():
            yield list(window.ids)

    def __len__(self) -> int:
        return self._loader.spec.windows


class ElasticLoader:
    """Yields this rank's batches from the cursor to the end of the epoch.

    Args:
        dataset: map-style.
        spec: what must stay the same over restarts.
        position: of the run, and of this process in it.
        device: to which the tensors of a batch are moved.
        options: further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        UsageError: an option is one that the loader sets itself.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        spec: DataSpec,
        *,
        position: Position,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        ours = sorted(set(options) & set(_OURS))
        if ours:
            raise UsageError(
                f"run.loader() sets {', '.join(ours)} itself, from global_batch_size, shuffle and drop_last; leave out "
                "what DataLoader calls so."
            )
        self.spec = spec
        self._position = position
        self._device = device
        self._generator = torch.Generator()
        ours_too = {"pin_memory": device.type == "cuda", "generator": self._generator}
        self._batches: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # torch asks for its class, and uses the two methods
            batch_sampler=_Windows(self),
            **{**ours_too, **options},
        )

    def __len__(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.spec.windows

    def windows(self) -> Iterator[Window]:
        """Yield the windows of this rank from the cursor to the end of the epoch."""
        cursor = self._position.cursor
        epoch, consumed = cursor.epoch, cursor.consumed
        rank, world_size = self._position.identity.rank, self._position.identity.world_size
        samples_at = order(self.spec, epoch)
        while consumed < self.spec.usable:
            block: list[tuple[range, range]] = []  # windows, and this rank's shares: the order of many at once is quick
            size = 0
            while len(block) < _BLOCK_WINDOWS and size < _BLOCK_SAMPLES and (window := self.spec.window(consumed)):
                part = share(len(window), world_size, rank)
                block.append((window, window[part.start : part.stop]))
                size += len(part)
                consumed = window.stop
            positions = [mine or window[:1] for window, mine in block]
            ids = samples_at(np.concatenate([np.arange(each.start, each.stop) for each in positions])).tolist()
            begin = 0
            for (window, mine), place in zip(block, positions, strict=True):
                yield Window(
                    ids=tuple(ids[begin : begin + len(place)]),
                    own=len(mine),
                    count=len(window),
                    after=Cursor(epoch, window.stop),
                    weight=weight(len(mine), len(window), world_size),
                    epoch_size=self.spec.usable,
                )
                begin += len(place)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            UsageError: ``run.step()`` was not called after the batch before.
        """
        position = self._position
        position.open = None  # an epoch that was left in the middle of a step
        if not position.in_epochs and position.cursor.consumed >= self.spec.usable:
            position.cursor = Cursor(position.cursor.epoch + 1)
        epoch, generation = position.cursor.epoch, -1
        while generation != position.generation and position.cursor.epoch == epoch:
            generation = position.generation
            # From here torch seeds its workers; the script's own random numbers are the same however often it begins.
            self._generator.manual_seed(seed_of(self.spec.seed, position.cursor, position.identity.rank))
            for window, batch in zip(self.windows(), self._batches, strict=True):
                position.take(window)
                yield _to_device(batch, self._device)
                if generation != position.generation:
                    position.require_committed()
                    break
        position.require_committed()


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    return value
