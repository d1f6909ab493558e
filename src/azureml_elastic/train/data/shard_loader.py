"""The elastic loader of datasets in shards.

The number of samples left in a stream is known only when they are read. The ranks therefore exchange, for each window,
the samples that each stream contributes and its position afterwards: every rank has the whole position, and any rank
can continue any stream. Windows are read one ahead, so that the last one of an epoch is known before it is trained.

The shards are assigned in turn to a fixed number of *streams*. A stream is the sequence of the samples of its shards.
Each step takes the next samples of every stream, so the position in the data is the position of each stream, and a
rank reads the streams that are assigned to it in the round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset, get_worker_info

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.loader import ElasticLoader, LoaderContext, seeded
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Window
from azureml_elastic.train.data.sampling import FILLER_SAMPLES, Cursor, LoaderSpec, Permutation, share, weight

T = TypeVar("T")

_STREAM_COUNTS = (240, 120, 60, 24, 12, 6, 4, 3, 2, 1)
"""Numbers with many divisors, so that streams can be divided evenly among most numbers of ranks."""


@runtime_checkable
class ShardedDataset(Protocol):
    """A dataset in shards; ``datasets.IterableDataset`` of Hugging Face is one, :class:`Shards` makes one."""

    @property
    def num_shards(self) -> int:
        """The number of shards."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return the samples of one of ``num_shards`` parts, in an order that is always the same."""


class Shards(Generic[T]):
    """A dataset of files, or of other items that are read one after the other.

    Args:
        items: paths or URLs, for example; the same on all ranks and over all restarts
        read: function that returns the samples of one item, always in the same order
    """

    def __init__(self, items: Sequence[T], read: Callable[[T], Iterable[Any]]) -> None:
        self._items = list(items)
        self._read = read

    @property
    def num_shards(self) -> int:
        """The number of items."""
        return len(self._items)

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return the samples of one item; ``num_shards`` must be the number of items."""
        if num_shards != len(self._items):
            raise UsageError(f"{len(self._items)} items cannot be read as {num_shards} shards.")
        return self._read(self._items[index])


@dataclass(frozen=True)
class ShardSpec(LoaderSpec):
    """Properties of a dataset in shards and its order."""

    shards: int
    streams: int

    @classmethod
    def make(cls, shards: int, streams: int | None, *, smallest_window: int | None = None, **fields: Any) -> ShardSpec:
        """Return the specification with this number of streams, or a suitable one.

        Args:
            streams: number of streams; ``None`` for the largest suitable one
            smallest_window: samples of a step at the smallest world size; ``None`` for the global batch size
        """
        size = int(fields["global_batch_size"])
        # A window takes from each stream: one with fewer samples than streams would leave the last streams unread.
        limit = min(shards, size, smallest_window or size)
        if limit < 1:
            raise UsageError(f"num_shards={shards} and global_batch_size={size}; both must be 1 or more.")
        if streams is not None and streams > limit:
            raise UsageError(
                f"logical_workers={streams} is above the limit of {limit}, the smaller one of num_shards={shards} and "
                f"global_batch_size={size}: each reads shards of its own. Write more shards, or lower it."
            )
        return cls(shards, streams or next(each for each in _STREAM_COUNTS if each <= limit), **fields)

    def over(self, cursor: Cursor) -> bool:  # noqa: ARG002 - unknown before all streams are read
        """Return whether the epoch is known to have no more samples."""
        return False

    def shards_of(self, stream: int, epoch: int) -> list[int]:
        """Return the shards of a stream in the order in which it reads them."""
        positions = np.arange(stream, self.shards, self.streams)
        if self.shuffle:
            key = xxhash.xxh3_64_intdigest(f"{self.seed}.{epoch}.shards".encode())
            positions = Permutation(self.shards, key)(positions)
        return [int(each) for each in positions]


class Part(NamedTuple):
    """The samples that a group of streams contributes to one window.

    Args:
        batch: collated samples, ``None`` without a sample
        ids: sample ids, ``shard << 32 | position in the shard``
        streams: number and position afterwards of each stream of the group
        seed: random seed that is the same at any world size
    """

    batch: Any
    ids: tuple[int, ...] = ()
    streams: tuple[tuple[int, int, int], ...] = ()
    seed: tuple[int, ...] = ()


@dataclass(eq=False)
class ShardStreamReader(IterableDataset[Part]):
    """Iterable over the parts of one window after the other, without end; after the last sample they are empty.

    In a ``DataLoader`` with processes, part ``i`` of each window is read by process ``i`` modulo their number.

    Args:
        groups: groups of streams, each of which contributes a part to each window
        window_size: samples of a window over all streams
        is_seeded: whether random numbers follow from the position in the data
    """

    dataset: ShardedDataset
    spec: ShardSpec
    cursor: Cursor
    groups: list[list[int]]
    window_size: int
    collate: Callable[[list[Any]], Any]
    is_seeded: bool

    def __iter__(self) -> Iterator[Part]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.cursor.epoch)
        at = self.cursor.streams or ((0, 0),) * self.spec.streams
        groups = [[self._open(number, at[number]) for number in group] for group in self.groups[first::step]]
        while True:
            for streams in groups:
                yield self._part(streams)

    def _open(self, number: int, at: tuple[int, int]) -> _ShardStream:
        return _ShardStream(self.dataset, self.spec, self.spec.shards_of(number, self.cursor.epoch), number, at)

    def _part(self, streams: list[_ShardStream]) -> Part:
        if not streams:
            return Part(None)
        seed = (self.spec.seed, self.cursor.epoch, streams[0].number, *streams[0].at)
        with seeded(*seed) if self.is_seeded else contextlib.nullcontext():
            taken = [
                each
                for stream in streams
                for each in stream.take(len(share(self.window_size, self.spec.streams, stream.number)))
            ]
            batch = self.collate([sample for sample, _ in taken]) if taken else None
        return Part(batch, tuple(id_ for _, id_ in taken), tuple((each.number, *each.at) for each in streams), seed)

    def filler(self) -> Any:
        """Return a batch of one or two samples."""
        for number in range(self.spec.streams):
            samples = [sample for sample, _ in self._open(number, (0, 0)).take(FILLER_SAMPLES)]
            if samples:
                return self.collate(samples)
        raise UsageError(f"None of the {self.spec.shards} shards holds a sample; check the function that reads them.")


@dataclass(eq=False)
class _ShardStream:
    """One sequence of samples.

    Args:
        at: index of the current shard in the stream, and number of samples read of it
    """

    dataset: ShardedDataset
    spec: ShardSpec
    shards: list[int]
    number: int
    at: tuple[int, int]
    reading: Iterator[Any] | None = field(default=None, init=False)

    def take(self, count: int) -> Iterator[tuple[Any, int]]:
        """Yield the next samples with their ids, fewer at the stream's end."""
        while count and self.at[0] < len(self.shards):
            shard = self.shards[self.at[0]]
            if self.reading is None:
                self.reading = self._open(shard, self.at[1])
            for sample in islice(self.reading, 1):
                sample_id = shard << 32 | self.at[1]
                self.at = (self.at[0], self.at[1] + 1)
                count -= 1
                yield sample, sample_id
                break
            else:  # the shard has no more samples
                self.reading, self.at = None, (self.at[0] + 1, 0)

    def _open(self, shard: int, skip: int) -> Iterator[Any]:
        samples = self.dataset.shard(num_shards=self.spec.shards, index=shard)
        if skip and hasattr(samples, "skip"):
            return iter(samples.skip(skip))
        return islice(iter(samples), skip, None)


class ShardLoader(ElasticLoader):
    """Iterable over this rank's batches of a dataset in shards. It has no length: the samples are not known ahead.

    Args:
        exchange: collective that adds a vector, int64 (1 + 2 * streams,), over all ranks, in place
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        state: LoaderState,
        context: LoaderContext,
        exchange: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__(state, context)
        if context.options.get("persistent_workers"):
            raise UsageError("persistent_workers=True keeps processes that read the last epoch's streams; remove it.")
        self._dataset = dataset
        self._exchange = exchange

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from the cursor to the end of the epoch, with their collated samples."""
        position, spec, size = self._position, self._spec, self._window_size
        generation, world_size = position.generation, position.identity.world_size
        cursor = self._state.cursor
        if world_size > spec.streams:
            raise UsageError(
                f"The {spec.shards} shards and global_batch_size={spec.global_batch_size} make {spec.streams} streams, "
                f"fewer than the {world_size} ranks, so that some would have nothing to read. Write more shards, or "
                "give each worker a larger batch."
            )
        groups = self._groups(world_size, position.identity.rank)
        reader = self._reader(cursor, groups)
        # With processes they read ahead: only what _agree() counts is consumed, and the rest is read again.
        parts = iter(self._make(reader, batch_size=None, collate_fn=identity))

        def following(cursor: Cursor) -> tuple[list[Part], Window | None]:
            mine = [part for part in islice(parts, len(groups)) if part.streams]
            window = self._agree(mine, cursor)
            return mine, None if not window.count or (spec.drop_last and window.count < size) else window

        mine, window = following(cursor)
        while window is not None and position.generation == generation:
            # Before this window is trained: only the next one, or that there is none, tells whether it ends the epoch.
            mine_after, after = following(window.after)
            if position.generation != generation:
                return  # a rank was lost in the exchange, and streams belong to other ranks now
            window = replace(window, ends_epoch=after is None)
            filled = [part for part in mine if part.ids] or [Part(reader.filler())]
            for index, part in enumerate(filled):
                own, last = len(part.ids), index == len(filled) - 1
                yield MicroBatch(window, own, weight(own, window.count, world_size), index, last, part.seed), part.batch
            cursor, mine, window = window.after, mine_after, after
        if position.generation == generation:
            self._steps.ended(self._state, cursor)
            if not position.in_epochs:
                self._state.cursor = Cursor(cursor.epoch + 1)

    def filler(self) -> Any:
        """Return a collated batch of one or two samples of the dataset."""
        return self._reader(self._state.cursor, []).filler()

    def _reader(self, cursor: Cursor, groups: list[list[int]]) -> ShardStreamReader:
        seeded = self._batching.exact
        return ShardStreamReader(self._dataset, self._spec, cursor, groups, self._window_size, self._collate, seeded)

    def _groups(self, world_size: int, rank: int) -> list[list[int]]:
        """Return the streams of each part of a window; as many parts as all processes can read at once."""
        mine = list(share(self._spec.streams, world_size, rank))
        processes = max(1, int(self._context.options.get("num_workers", 0)))
        if self._batching.logical_workers is not None:
            groups = [[stream] for stream in mine]
        else:
            number = min(processes, len(mine))
            groups = [[mine[index] for index in share(len(mine), number, part)] for part in range(number)]
        # torch takes a part from each of its processes in turn, so each must have as many in a window as the others.
        return groups + [[] for _ in range(-len(groups) % processes)]

    def _agree(self, mine: list[Part], cursor: Cursor) -> Window:
        """Return the window of all ranks' parts, with the positions of all streams after it. A collective."""
        # Samples of the window, and for each stream the index of its shard and the samples that are read of that.
        table = torch.zeros(1 + 2 * self._spec.streams, dtype=torch.int64)
        for part in mine:  # a stream is read by one rank alone: where the others have zeros, the sum is its position
            table[0] += len(part.ids)
            for stream, at, read in part.streams:
                table[1 + 2 * stream], table[2 + 2 * stream] = at, read
        self._exchange(table)
        count, *numbers = table.tolist()
        after = Cursor(cursor.epoch, cursor.consumed + count, tuple(zip(numbers[::2], numbers[1::2], strict=True)))
        ids = tuple(each for part in mine for each in part.ids)
        return Window(ids=ids, count=count, before=cursor, after=after, epoch_size=None)


def identity(part: Any) -> Any:
    """Return a part, whose samples are collated already; a function by name, for processes that are spawned."""
    return part
