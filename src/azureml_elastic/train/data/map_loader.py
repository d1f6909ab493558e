"""The elastic loader of map-style datasets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from azureml_elastic.train.data.batching import Batching
from azureml_elastic.train.data.loader import ElasticLoader, require_foreign
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Position, Window
from azureml_elastic.train.data.sampling import Cursor, DataSpec, order, parts, weight
from azureml_elastic.train.data.seeding import SeededCollate, SeededDataset, SeededIds

__all__ = ["MapLoader", "SizedDataset"]

_BLOCK_SAMPLES, _BLOCK_WINDOWS = 1 << 13, 1 << 8

_FILLER = 2
"""Samples of a batch that does not count: batch normalisation refuses a single one."""


@runtime_checkable
class SizedDataset(Protocol):
    """A map-style dataset."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


class MapLoader(ElasticLoader):
    """Iterable over this rank's batches of a map-style dataset.

    Args:
        dataset: map-style dataset
        spec: properties of the data that must not change over restarts
        batching: division of windows into micro-batches
        state: position of this loader
        position: position of the run
        device: device that the tensors of a batch are moved to
        kind: ``torch.utils.data.DataLoader``, or a class of the same arguments, such as torchdata's
            ``StatefulDataLoader``
        options: further arguments of ``kind``

    Raises:
        UsageError: an option is one that the loader sets itself.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        spec: DataSpec,
        batching: Batching,
        *,
        state: LoaderState,
        position: Position,
        device: torch.device,
        kind: type[DataLoader[Any]] = DataLoader,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(spec, state, position, device)
        require_foreign(options)
        self._batching = batching
        self._plan: deque[MicroBatch] = deque()
        self._dataset = dataset
        self._collate = options.get("collate_fn") or default_collate
        source: Any = dataset
        if batching.exact:
            source = SeededDataset(dataset)
            options = {**options, "collate_fn": SeededCollate(self._collate)}
        defaults = {"pin_memory": device.type == "cuda", "generator": self._generator}
        self._fetched: DataLoader[Any] = kind(
            source, batch_sampler=_Batches(self, self._plan), **{**defaults, **options}
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch at the reference world size, the unit of learning rate schedules."""
        return int(self.spec.windows)

    def __len__(self) -> int:
        """Return the number of batches that an iteration which begins now yields on this rank.

        That is the rest of the current epoch if the run has resumed in its middle, and the next epoch outside of
        ``run.epochs()`` once the current one is trained. It counts micro-batches, follows ``drop_last``, and holds
        while the world size stays.
        """
        cursor, world_size = self._state.cursor, self._position.identity.world_size
        consumed = 0 if self.over and not self._position.in_epochs else cursor.consumed
        size = self._window_size
        whole, rest = divmod(len(range(consumed, self.spec.trained(consumed, size))), size)
        found = whole * self._parts_of(size, world_size) + (self._parts_of(rest, world_size) if rest else 0)
        repeats = not found and self._position.in_epochs and self._last_epoch != cursor.epoch
        return 1 if repeats else found

    @property
    def over(self) -> bool:
        """Whether the current epoch has no window left at this world size."""
        return not self.spec.window(self._state.cursor.consumed, self._window_size)

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from the cursor to the end of the epoch, with their collated samples."""
        for batch in self._fetched:
            yield self._plan.popleft(), batch

    def filler(self) -> Any:
        """Return a collated batch of one or two samples of the data set."""
        return self._collate([self._dataset[index] for index in range(min(_FILLER, self.spec.length))])

    def planned(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Yield micro-batches and the ids of the samples to fetch; a rank without samples fetches a filler batch."""
        epoch, world_size = self._state.cursor.epoch, self._position.identity.world_size
        size = self._window_size
        samples_at = order(self.spec, epoch)
        for block in self._blocks(size, world_size):
            fetched = [mine or [window[:_FILLER]] for window, mine in block]
            positions = np.concatenate([np.arange(part.start, part.stop) for each in fetched for part in each])
            ids = samples_at(positions).tolist()
            begin = 0
            for (window, mine), ranges in zip(block, fetched, strict=True):
                trained = self.spec.trained(window.start, size)
                whole = Window(
                    ids=tuple(ids[begin : begin + sum(map(len, mine))]),
                    count=len(window),
                    before=Cursor(epoch, window.start),
                    after=Cursor(epoch, window.stop),
                    epoch_size=trained,
                    ends_epoch=window.stop >= trained,
                )
                for index, part in enumerate(ranges):
                    own = len(part) if mine else 0
                    place = (self.spec.seed, epoch, part.start)
                    micro = MicroBatch(
                        window=whole,
                        samples=own,
                        weight=weight(own, len(window), world_size),
                        index=index,
                        last=index == len(ranges) - 1,
                        place=place,
                    )
                    part_ids = ids[begin : begin + len(part)]
                    yield micro, SeededIds(part_ids, place) if self._batching.exact else part_ids
                    begin += len(part)

    @property
    def _window_size(self) -> int:
        return self._batching.window_size(self.spec.global_batch_size, self._position.identity.world_size)

    def _parts(self, count: int, world_size: int) -> list[range]:
        how = {"logical_workers": self._batching.logical_workers, "most": self._batching.micro_batch_size}
        return parts(count, world_size, self._position.identity.rank, **how)

    def _parts_of(self, count: int, world_size: int) -> int:
        return max(1, len(self._parts(count, world_size)))

    def _blocks(self, size: int, world_size: int) -> Iterator[list[tuple[range, list[range]]]]:
        """Yield blocks of windows with this rank's parts of them: the order of many samples is computed at once."""
        consumed = self._state.cursor.consumed
        block: list[tuple[range, list[range]]] = []
        samples = 0
        while window := self.spec.window(consumed, size):
            mine = self._parts(len(window), world_size)
            block.append((window, [window[part.start : part.stop] for part in mine]))
            samples += sum(map(len, mine))
            consumed = window.stop
            if len(block) == _BLOCK_WINDOWS or samples >= _BLOCK_SAMPLES:
                yield block
                block, samples = [], 0
        if block:
            yield block


class _Batches:
    """Batch sampler that yields the ids of this rank's micro-batches, and appends the micro-batches to ``plan``."""

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
