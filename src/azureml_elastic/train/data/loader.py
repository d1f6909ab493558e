"""The data loader that trains each sample once an epoch, whatever happens to the world size.

Each iteration yields one of this rank's micro-batches of one window. The position advances only when ``run.commit()``
commits, so batches that worker processes have prefetched do not count until they are trained.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from azureml_elastic.checkpoint.state.random_state import seed_of
from azureml_elastic.config import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Position, Window
from azureml_elastic.train.data.sampling import Cursor, DataSpec, order, parts, weight
from azureml_elastic.train.data.seeding import SeededCollate, SeededDataset, SeededIds

__all__ = ["Batching", "ElasticLoader", "MapLoader", "SizedDataset", "require_foreign", "to_device"]

_LOG = logging.getLogger(__name__)

_BLOCK_SAMPLES, _BLOCK_WINDOWS = 1 << 13, 1 << 8

_STAND_IN = 2
"""Samples of a batch that does not count: batch normalisation refuses a single one."""

_OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last")


@runtime_checkable
class SizedDataset(Protocol):
    """A map-style dataset."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


@dataclass(frozen=True)
class Batching:
    """How windows become micro-batches.

    Args:
        policy: of the run.
        micro_batch_size: samples of a micro-batch at most, ``None`` for any number.
    """

    policy: BatchPolicy
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UsageError(
                f"micro_batch_size={self.micro_batch_size} is below the limit of 1; give the samples of a forward pass."
            )

    @property
    def logical_workers(self) -> int | None:
        """Among which a window is dealt out first."""
        return self.policy.logical_workers if isinstance(self.policy, FixedGlobalBatch) else None

    @property
    def exact(self) -> bool:
        """Whether micro-batches must be the same to the bit at any world size."""
        return isinstance(self.policy, FixedGlobalBatch) and self.policy.reduce == "exact"

    def require_fitting(self, global_batch_size: int) -> None:
        """Check that windows can be dealt out.

        Raises:
            UsageError: they cannot.
        """
        workers = self.logical_workers
        if workers is not None and workers > global_batch_size:
            raise UsageError(
                f"logical_workers={workers} is above global_batch_size={global_batch_size}; each needs a sample."
            )
        if isinstance(self.policy, FixedPerWorkerBatch) and global_batch_size % self.policy.reference_world_size:
            raise UsageError(
                f"global_batch_size={global_batch_size} cannot be divided by "
                f"reference_world_size={self.policy.reference_world_size}, so there is no batch per worker."
            )

    def window_size(self, global_batch_size: int, world_size: int) -> int:
        """Return the samples of a step."""
        if isinstance(self.policy, FixedPerWorkerBatch):
            return global_batch_size // self.policy.reference_world_size * world_size
        return global_batch_size


class ElasticLoader(ABC):
    """Yields this rank's batches from the cursor to the end of the epoch.

    Args:
        spec: what must stay the same over restarts.
        stream: its place in the run.
        position: of the run.
        device: to which the tensors of a batch are moved.
    """

    def __init__(self, spec: Any, stream: LoaderState, position: Position, device: torch.device) -> None:
        self.spec = spec
        self._stream = stream
        self._position = position
        self._device = device
        self._generator = torch.Generator()
        self._trains: int | None = None  # the epoch of the last batch, or of what was said instead of one

    @property
    def name(self) -> str:
        """Under which the run knows it."""
        return self._stream.name

    @property
    def over(self) -> bool:
        """Whether the epoch at hand is known to have no more batches."""
        return bool(self.spec.over(self._stream.cursor))

    @abstractmethod
    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield micro-batches of this rank from the cursor to the end of the epoch, with what is fetched for them."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            UsageError: ``run.commit()`` was not called after the batch before.
        """
        position, stream = self._position, self._stream
        stream.open = None  # an epoch that was left in the middle of a step
        if not position.in_epochs and self.over:
            stream.cursor = Cursor(stream.cursor.epoch + 1)
        epoch, began, again = stream.cursor.epoch, stream.cursor.consumed, True
        while again and stream.cursor.epoch == epoch:
            again, generation = False, position.generation
            # From here torch seeds its workers; the script's own random numbers are the same however often it begins.
            place = (stream.cursor.epoch, stream.cursor.consumed)
            self._generator.manual_seed(seed_of(self.spec.seed, *place, position.identity.rank))
            for micro, batch in self.batches():
                if generation != position.generation:
                    break  # while it was fetched
                position.take(stream, micro)
                self._trains = epoch
                yield to_device(batch, self._device)
                dropped = micro.last and stream.open is None and stream.cursor != micro.window.after
                if dropped or generation != position.generation:
                    position.require_committed(stream)
                    again = True
                    break
            again = again or generation != position.generation
        position.require_committed(stream)
        if began and self._trains != epoch and position.identity.rank == 0:
            self._trains = epoch
            _LOG.warning(
                "The loader %r has no batch left in epoch %d, which was at hand when the run was interrupted: the loop "
                "over it is empty, and its variables are not set. What follows it runs.",
                self.name,
                epoch,
            )


class MapLoader(ElasticLoader):
    """Yields batches of a map-style dataset.

    Args:
        dataset: map-style.
        spec: what must stay the same over restarts.
        batching: how windows become micro-batches.
        stream: its place in the run.
        position: of the run.
        device: to which the tensors of a batch are moved.
        kind: ``torch.utils.data.DataLoader``, or a class of the same arguments, such as torchdata's
            ``StatefulDataLoader``.
        options: further arguments of it.

    Raises:
        UsageError: an option is one that the loader sets itself.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        spec: DataSpec,
        batching: Batching,
        *,
        stream: LoaderState,
        position: Position,
        device: torch.device,
        kind: type[DataLoader[Any]] = DataLoader,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(spec, stream, position, device)
        self._batching = batching
        self._plan: deque[MicroBatch] = deque()
        require_foreign(options)
        source: Any = dataset
        if batching.exact:
            source = SeededDataset(dataset)
            options = {**options, "collate_fn": SeededCollate(options.get("collate_fn") or default_collate)}
        ours_too = {"pin_memory": device.type == "cuda", "generator": self._generator}
        self._fetched: DataLoader[Any] = kind(
            source,
            batch_sampler=_Batches(self, self._plan),
            **{**ours_too, **options},
        )

    def __len__(self) -> int:
        """Optimizer steps of a whole epoch, at the reference world size."""
        windows: int = self.spec.windows
        return windows

    @property
    def over(self) -> bool:
        """Whether no window is left in the epoch at hand, at this world size."""
        size = self._batching.window_size(self.spec.global_batch_size, self._position.identity.world_size)
        return not self.spec.window(self._stream.cursor.consumed, size)

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield micro-batches with what was fetched for them."""
        for batch in self._fetched:
            yield self._plan.popleft(), batch

    def planned(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Yield micro-batches with the samples to fetch, at least one: those of a stand-in do not count."""
        epoch, world_size = self._stream.cursor.epoch, self._position.identity.world_size
        size = self._batching.window_size(self.spec.global_batch_size, world_size)
        samples_at = order(self.spec, epoch)
        for block in self._blocks(size, world_size):
            fetched = [mine or [window[:_STAND_IN]] for window, mine in block]
            positions = np.concatenate([np.arange(part.start, part.stop) for each in fetched for part in each])
            ids = samples_at(positions).tolist()
            begin = 0
            for (window, mine), asked in zip(block, fetched, strict=True):
                whole = Window(
                    ids=tuple(ids[begin : begin + sum(map(len, mine))]),
                    count=len(window),
                    before=Cursor(epoch, window.start),
                    after=Cursor(epoch, window.stop),
                    epoch_size=self.spec.trained(window.start, size),
                )
                for index, part in enumerate(asked):
                    own = len(part) if mine else 0
                    place = (self.spec.seed, epoch, part.start)
                    micro = MicroBatch(
                        window=whole,
                        samples=own,
                        weight=weight(own, len(window), world_size),
                        index=index,
                        last=index == len(asked) - 1,
                        place=place,
                    )
                    part_ids = ids[begin : begin + len(part)]
                    yield micro, SeededIds(part_ids, place) if self._batching.exact else part_ids
                    begin += len(part)

    def _blocks(self, size: int, world_size: int) -> Iterator[list[tuple[range, list[range]]]]:
        """Yield windows and this rank's parts of them, many at once: their order is computed quickest so."""
        rank, consumed = self._position.identity.rank, self._stream.cursor.consumed
        how = {"logical_workers": self._batching.logical_workers, "most": self._batching.micro_batch_size}
        block: list[tuple[range, list[range]]] = []
        samples = 0
        while window := self.spec.window(consumed, size):
            mine = parts(len(window), world_size, rank, **how)
            block.append((window, [window[part.start : part.stop] for part in mine]))
            samples += sum(map(len, mine))
            consumed = window.stop
            if len(block) == _BLOCK_WINDOWS or samples >= _BLOCK_SAMPLES:
                yield block
                block, samples = [], 0
        if block:
            yield block


class _Batches:
    """The batch sampler: the samples of a rank's micro-batches, from the cursor to the epoch's end.

    Args:
        loader: that plans them.
        plan: where the micro-batches are noted down whose samples are being fetched, in order.
    """

    def __init__(self, loader: MapLoader, plan: deque[MicroBatch]) -> None:
        self._loader = loader
        self._plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        self._plan.clear()
        for micro, ids in self._loader.planned():
            self._plan.append(micro)
            yield ids

    def __len__(self) -> int:
        return len(self._loader)


def require_foreign(options: Mapping[str, Any]) -> None:
    """Check that options of a ``DataLoader`` are none that an elastic loader sets itself.

    Raises:
        UsageError: one is.
    """
    ours = sorted(set(options) & set(_OURS))
    if ours:
        raise UsageError(
            f"run.loader() sets {', '.join(ours)} itself, from global_batch_size, micro_batch_size, shuffle and "
            "drop_last; leave out what DataLoader calls so."
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
