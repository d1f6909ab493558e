"""The elastic loaders of map-style datasets, one of the same length at any world size for stacks that count by it."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import DataLoader, default_collate

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.train.data.drawn_order import DrawnOrder
from azureml_elastic.train.data.loader import ElasticLoader, LoaderContext, SeededDataset, SeededIds, to_device
from azureml_elastic.train.data.parted_batches import PartedBatch, PartedCollate
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Window
from azureml_elastic.train.data.sampling import FILLER_SAMPLES, Cursor, order, parts, weight

_BLOCK_SAMPLES, _BLOCK_WINDOWS = 1 << 13, 1 << 8
"""Samples and windows whose order is computed at once: a call of NumPy costs as much as hundreds of numbers in it."""


@runtime_checkable
class SizedDataset(Protocol):
    """A map-style dataset."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


class MapLoader(ElasticLoader):
    """Iterable over this rank's batches of a map-style dataset."""

    def __init__(
        self, dataset: SizedDataset, state: LoaderState, context: LoaderContext, drawn: DrawnOrder | None = None
    ) -> None:
        super().__init__(state, context)
        self._dataset = dataset
        self._drawn = drawn
        self._plan: deque[MicroBatch] = deque()
        sampler = {"batch_sampler": _BatchSampler(self, self._plan)}
        if self._batching.exact:
            self._fetched = self._make(SeededDataset(dataset), **sampler)
        else:
            self._fetched = self._make(dataset, **sampler)

    @property
    def steps_per_epoch(self) -> int:
        """See :class:`ElasticLoader`."""
        return int(self._spec.windows)

    def __len__(self) -> int:
        """See :class:`ElasticLoader`."""
        cursor, size = self._state.cursor, self._window_size
        consumed = 0 if self.over and not self._position.in_epochs else cursor.consumed
        whole, rest = divmod(len(range(consumed, self._spec.trained(consumed, size))), size)
        least = self._least
        found = whole * max(least, len(self._parts(size))) + (max(least, len(self._parts(rest))) if rest else 0)
        # The filler batch where the run has resumed after the last step of an epoch, see ElasticLoader.__iter__().
        repeats = not found and self._position.in_epochs and self._last_epoch != cursor.epoch
        return 1 if repeats else found

    @property
    def micro_batches(self) -> int:
        """Largest number of micro-batches that a rank has in a whole window at this world size."""
        return self._most_micro_batches(self._window_size)

    def _most_micro_batches(self, size: int) -> int:
        if self._batching.micro_batches is not None:
            return self._batching.micro_batches
        return max(1, *(len(self._parts_of(rank, size)) for rank in range(self._position.identity.world_size)))

    @property
    def largest(self) -> int:
        """Number of samples of the largest micro-batch of a rank at this world size."""
        ranks = range(self._position.identity.world_size)
        return max((len(part) for rank in ranks for part in self._parts_of(rank, self._window_size)), default=0)

    @property
    def over(self) -> bool:
        """Whether the current epoch has no window left at this world size."""
        return not self._spec.window(self._state.cursor.consumed, self._window_size)

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from the cursor to the end of the epoch, with their collated samples."""
        for batch in self._fetched:
            # torch draws from the batch sampler ahead of time, in this process, and yields the batches in its order:
            # the oldest entry of the plan belongs to this batch, whichever worker process has fetched it.
            micro = self._plan.popleft()
            if isinstance(batch, PartedBatch):
                yield replace(micro, parts=batch.parts), batch.whole
            else:
                yield micro, batch

    def batches_from(self, cursor: Cursor) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the same from another position, by this process, and leave that of the run as it is."""
        elsewhere = LoaderState(self.name, self._state.spec, cursor)
        options = {**self._context.options, "num_workers": 0, "persistent_workers": False, "timeout": 0}
        for name in ("prefetch_factor", "multiprocessing_context"):  # which torch refuses without processes
            options.pop(name, None)
        context = replace(self._context, options=options)
        batches = MapLoader(self._dataset, elsewhere, context, self._drawn).batches()
        while True:
            # What is read here may not be trained next, so the random sequences of training go on after it.
            with random_state.kept() if self._batching.exact else contextlib.nullcontext():
                found = next(batches, None)
            if found is None:
                return
            yield found[0], to_device(found[1], self._context.device)

    def filler(self, samples: int = FILLER_SAMPLES) -> Any:
        """Return a collated batch of one or two samples of the dataset, as often as the batch has samples."""
        epoch, drawn = self._state.cursor.epoch, self._drawn
        ids = [*range(min(FILLER_SAMPLES, self._spec.length))] if drawn is None else drawn.some(epoch)
        few = [self._dataset[index] for index in ids]
        return self._collate([few[index % len(few)] for index in range(samples)])

    def repeat(self) -> Any:
        """Return this rank's last batch, collated, of the window before the cursor; it may hold a filler's samples."""
        cursor, size = self._state.cursor, self._window_size
        window = self._spec.window((cursor.consumed - 1) // size * size, size)
        mine = self._parts(len(window))
        part = window[mine[-1].start : mine[-1].stop] if mine else window[:FILLER_SAMPLES]
        ids = order(self._spec, cursor.epoch)(np.array(part)).tolist()
        return self._collate([self._dataset[id_] for id_ in self._samples(cursor.epoch, ids, counts=bool(mine))])

    def _samples(self, epoch: int, ids: list[int], *, counts: bool) -> list[int]:
        return ids if self._drawn is None else self._drawn.samples(epoch, ids, counts=counts)

    def _count(self, epoch: int, positions: range) -> int:
        """Return what a mean loss counts at positions of the order: samples, or batches that stay apart."""
        if self._drawn is None or self._batching.micro_batches is None:
            return len(positions)
        # Where a loop counts batches, those of a rank are put together: their losses are a mean over all their samples.
        numbers = order(self._spec, epoch)(np.array(positions)).tolist()
        return len(self._drawn.samples(epoch, numbers))

    def planned(self) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Yield micro-batches and the ids of the samples to fetch; a rank without samples fetches a filler batch."""
        epoch, world_size, size = self._state.cursor.epoch, self._position.identity.world_size, self._window_size
        samples_at, least = order(self._spec, epoch), self._least
        for block in self._blocks(size):
            fetched = [mine + [window[:FILLER_SAMPLES]] * (least - len(mine)) for window, mine in block]
            # int64 (samples of the block,): of one window after the other, and of its parts in their order.
            positions = np.concatenate([np.arange(part.start, part.stop) for each in fetched for part in each])
            ids = samples_at(positions).tolist()
            begin = 0
            for (window, mine), ranges in zip(block, fetched, strict=True):
                trained = self._spec.trained(window.start, size)
                total = self._count(epoch, window)
                whole = Window(
                    ids=tuple(ids[begin : begin + sum(map(len, mine))]),
                    count=len(window),
                    before=Cursor(epoch, window.start),
                    after=Cursor(epoch, window.stop),
                    epoch_size=trained,
                    ends_epoch=window.stop >= trained,
                )
                for index, part in enumerate(ranges):
                    counts, last = index < len(mine), index == len(ranges) - 1
                    own = self._count(epoch, part) if counts else 0
                    share = weight(own, total, world_size)
                    micro = MicroBatch(whole, own, share, index, last, seed=(self._spec.seed, epoch, part.start))
                    part_ids = self._samples(epoch, ids[begin : begin + len(part)], counts=counts)
                    yield micro, SeededIds(part_ids, micro.seed) if self._batching.exact else part_ids
                    begin += len(part)

    @property
    def _least(self) -> int:
        """Number of micro-batches of a window that has samples for fewer."""
        counted = self._batching.equal_counts or self._batching.micro_batches is not None
        return self.micro_batches if counted else 1

    def _parts(self, count: int) -> list[range]:
        return self._parts_of(self._position.identity.rank, count)

    def _parts_of(self, rank: int, count: int) -> list[range]:
        division = self._batching
        limits = {"most": division.micro_batch_size, "number": division.micro_batches}
        world_size = self._position.identity.world_size
        return parts(count, world_size, rank, logical_workers=division.logical_workers, **limits)

    def _blocks(self, size: int) -> Iterator[list[tuple[range, list[range]]]]:
        """Yield blocks of windows with this rank's parts of them: the order of many samples is computed at once."""
        consumed = self._state.cursor.consumed
        block: list[tuple[range, list[range]]] = []
        samples = 0
        while window := self._spec.window(consumed, size):
            mine = self._parts(len(window))
            block.append((window, [window[part.start : part.stop] for part in mine]))
            samples += sum(map(len, mine))
            consumed = window.stop
            if len(block) == _BLOCK_WINDOWS or samples >= _BLOCK_SAMPLES:
                yield block
                block, samples = [], 0
        if block:
            yield block


@dataclass(eq=False)
class _BatchSampler:
    """Batch sampler that yields the ids of this rank's micro-batches, and appends the micro-batches to ``plan``."""

    loader: MapLoader
    plan: deque[MicroBatch]

    def __iter__(self) -> Iterator[list[int]]:
        self.plan.clear()  # of what was fetched ahead in an iteration that was broken off
        for micro, ids in self.loader.planned():
            self.plan.append(micro)
            yield ids

    def __len__(self) -> int:
        return len(self.loader)


class WindowLoader(MapLoader):
    """A loader whose number of windows in an epoch does not depend on the world size.

    An iteration begins at the position in the data. Its length is that of a whole epoch nevertheless: stacks compute
    their position in an epoch from the number of steps, and skip what is trained.

    Attributes:
        untrained: micro-batches that were yielded and not trained yet
        closed: whether iterations yield nothing, because the training is complete
        collated: collates the samples of each batch that an iteration fetches from now on, if asked to in parts as well
    """

    _is_accelerate_prepared = True  # accelerate divides other loaders among the ranks

    def __init__(
        self, dataset: SizedDataset, state: LoaderState, context: LoaderContext, drawn: DrawnOrder | None = None
    ) -> None:
        self.collated = PartedCollate(context.options.get("collate_fn") or default_collate)
        options = {**context.options, "collate_fn": self.collated}
        super().__init__(dataset, state, replace(context, options=options), drawn)
        self._collate = self.collated.collate  # of fillers, which nobody divides
        self.dataset = dataset
        self.batch_size = self._batching.micro_batch_size
        self.untrained: deque[MicroBatch] = deque()
        self.closed = False
        self._begin: Cursor | None = None  # of an iteration that has passed over windows
        self._counted: dict[int, int] = {}

    @property
    def is_drawn(self) -> bool:
        """Whether a sampler draws the order of the samples."""
        return self._drawn is not None

    @property
    def epoch(self) -> int:
        """Epoch of the position in the data."""
        return self._state.cursor.epoch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each window of the current epoch, on every rank."""
        return self.micro_batches_in(self.epoch)

    def micro_batches_in(self, epoch: int) -> int:
        """Return the micro-batches of each window of an epoch, on every rank."""
        if epoch not in self._counted:  # stacks ask at each batch, and their processes end with the round
            size = self._batching.window_size(
                self._state.spec.at(epoch).global_batch_size, self._position.identity.world_size
            )
            self._counted[epoch] = self._most_micro_batches(size)
        return self._counted[epoch]

    def __len__(self) -> int:
        """Return the number of micro-batches of a whole epoch."""
        return self.steps_per_epoch * self.micro_batches

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the session has the position. Stacks take loaders with this method for resumable ones."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def some_samples(self, most: int) -> list[Any]:
        """Return some samples of the dataset, to look at."""
        length = len(self.dataset)
        with random_state.kept():
            return [self.dataset[index] for index in random.Random(0).sample(range(length), min(most, length))]

    def cursor_at(self, epoch: int, window: int) -> Cursor:
        """Return the position before a window, at the reference world size."""
        return Cursor(epoch, window * self._state.spec.at(epoch).global_batch_size)

    def sizes(self, epoch: int, window: int) -> list[int]:
        """Return the number of samples of each of this rank's micro-batches in a window of an epoch."""
        whole = self._spec.window(window * self._spec.global_batch_size, self._window_size)
        if self._drawn is None or not self._drawn.whole_batches:
            return self._sizes_of(len(whole))
        mine = [self._count(epoch, whole[part.start : part.stop]) for part in self._parts(len(whole))]
        return mine + [len(self._drawn.some(epoch))] * (self._least - len(mine))

    def samples_of(self, batches: int, epoch: int) -> int:
        """Return the most samples of a number of the script's batches of an epoch, whose sampler may yield batches."""
        return batches if self._drawn is None else batches * self._drawn.largest(epoch)

    @functools.cache  # noqa: B019 - of the two lengths that windows have
    def _sizes_of(self, count: int) -> list[int]:
        mine = [len(part) for part in self._parts(count)]
        return mine + [min(FILLER_SAMPLES, count)] * (self._least - len(mine))

    def pass_over(self) -> None:
        """Go on after the current window, which the script has not trained: for this iteration alone."""
        state = self._state
        if self._begin is None:
            self._begin = state.cursor
        if state.open is not None:
            state.cursor = state.open.window.after
            self._steps.leave(state)

    def end_pass(self, *, trained: bool) -> None:
        """Leave an iteration; return to its beginning, unless the script has trained one of its batches."""
        self.untrained.clear()
        begin, self._begin = self._begin, None
        if not trained:
            self._steps.leave(self._state)
            if begin is not None:
                self._state.cursor = begin

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the epoch."""
        self.untrained.clear()
        if self.closed:
            return
        for batch in super().__iter__():
            micro = self._state.open
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
