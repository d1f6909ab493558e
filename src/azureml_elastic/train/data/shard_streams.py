"""Reading a data set that comes in shards, such that it can go on anywhere, at any world size.

The shards are dealt out to a fixed number of *streams*, as cards are. A stream is a sequence of samples: its shards,
one after the other. Each step takes the next samples of every stream, so where the data stand is where each stream
stands, and a rank reads the streams that fall to it in the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import xxhash
from torch.utils.data import IterableDataset, get_worker_info

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.permutation import Permutation
from azureml_elastic.train.data.sampling import Cursor, require_same, share
from azureml_elastic.train.data.seeding import seeded

__all__ = ["Part", "ShardSpec", "ShardStreamReader", "ShardedDataset", "Shards"]

T = TypeVar("T")

_STREAM_COUNTS = (240, 120, 60, 24, 12, 6, 4, 3, 2, 1)
"""Numbers with many divisors, so that streams can be dealt out evenly to most numbers of ranks."""


@runtime_checkable
class ShardedDataset(Protocol):
    """A data set in shards; ``datasets.IterableDataset`` of Hugging Face is one, :class:`Shards` makes one."""

    @property
    def num_shards(self) -> int:
        """The number of shards."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return the samples of one of ``num_shards`` parts, in an order that is always the same."""


class Shards(Generic[T]):
    """A data set of files, or of whatever else can be read one after the other.

    Args:
        items: paths or URLs, say; the same on all ranks and over all restarts.
        read: returns the samples of one of them, always in the same order.
    """

    def __init__(self, items: Sequence[T], read: Callable[[T], Iterable[Any]]) -> None:
        self._items = list(items)
        self._read = read

    @property
    def num_shards(self) -> int:
        """The number of items."""
        return len(self._items)

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return the samples of one item.

        Raises:
            UsageError: asked for another division than that into items.
        """
        if num_shards != len(self._items):
            raise UsageError(f"{len(self._items)} items cannot be read as {num_shards} shards.")
        return self._read(self._items[index])


@dataclass(frozen=True)
class ShardSpec:
    """What must stay the same over all restarts of a run for each sample to be trained once an epoch.

    Args:
        shards: number of shards of the dataset.
        streams: number of streams that they are assigned to.
        global_batch_size: samples of one optimizer step over all ranks.
        seed: random seed of the order of the shards.
        shuffle: whether that is random.
        drop_last: whether incomplete windows at the end of an epoch are left out.
    """

    shards: int
    streams: int
    global_batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    @classmethod
    def make(cls, shards: int, streams: int | None, **fields: Any) -> ShardSpec:
        """Return the specification with a number of streams that suits.

        Raises:
            UsageError: there are too few shards, or too few samples in a step.
        """
        size = int(fields["global_batch_size"])
        limit = min(shards, size)
        if limit < 1:
            raise UsageError(f"num_shards={shards} and global_batch_size={size}; both must be 1 or more.")
        if streams is not None and streams > limit:
            raise UsageError(
                f"logical_workers={streams} is above the limit of {limit}, the smaller one of num_shards={shards} and "
                f"global_batch_size={size}: each reads shards of its own. Write more shards, or lower it."
            )
        return cls(shards, streams or next(each for each in _STREAM_COUNTS if each <= limit), **fields)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, to be saved with a checkpoint."""
        return asdict(self)

    def over(self, cursor: Cursor) -> bool:  # noqa: ARG002 - nobody knows before all streams are read
        """Tell whether the epoch is known to have no more samples."""
        return False

    def require_same(self, saved: Any) -> None:
        """Check that a checkpoint's cursor means the same here.

        Raises:
            UsageError: it does not; the message names what changed.
        """
        require_same(saved, self.to_json())

    def shards_of(self, stream: int, epoch: int) -> list[int]:
        """Return the shards of a stream in the order in which it reads them."""
        places = np.arange(stream, self.shards, self.streams)
        if not self.shuffle:
            return [int(each) for each in places]
        key = xxhash.xxh3_64_intdigest(f"{self.seed}.{epoch}.shards".encode())
        return [int(each) for each in Permutation(self.shards, key)(places)]


class Part(NamedTuple):
    """What a group of streams gives to one window.

    Args:
        batch: collated, ``None`` without a sample.
        ids: sample ids, ``shard << 32 | position in the shard``.
        streams: the group's streams and where each stands afterwards.
        place: names the part whatever the world size.
    """

    batch: Any
    ids: tuple[int, ...] = ()
    streams: tuple[tuple[int, int, int], ...] = ()
    place: tuple[int, ...] = ()


class ShardStreamReader(IterableDataset[Part]):
    """Yields the parts of one window after the other, without end; after the last sample they are empty.

    In a ``DataLoader`` with processes, part ``i`` of each window is read by process ``i`` modulo their number.

    Args:
        dataset: dataset in shards.
        spec: specification of its order.
        cursor: where to begin.
        groups: groups of streams, each of which contributes a part to each window.
        window_size: samples of a window over all streams.
        collate: makes a batch of samples.
        is_seeded: whether random numbers follow from the place in the data.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        spec: ShardSpec,
        cursor: Cursor,
        groups: list[list[int]],
        window_size: int,
        collate: Callable[[list[Any]], Any],
        *,
        is_seeded: bool,
    ) -> None:
        self._dataset = dataset
        self._spec = spec
        self._cursor = cursor
        self._groups = groups
        self._window_size = window_size
        self._collate = collate
        self._is_seeded = is_seeded

    def __iter__(self) -> Iterator[Part]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._cursor.epoch)
        at = self._cursor.streams or ((0, 0),) * self._spec.streams
        streams = {
            stream: _ShardStream(self._dataset, self._spec, stream, self._cursor.epoch, at[stream])
            for group in self._groups[first::step]
            for stream in group
        }
        while True:
            for group in self._groups[first::step]:
                yield self._part([streams[stream] for stream in group])

    def _part(self, streams: list[_ShardStream]) -> Part:
        if not streams:
            return Part(None)
        begin = streams[0]
        place = (self._spec.seed, self._cursor.epoch, begin.number, *begin.at)
        with seeded(*place, on=self._is_seeded):
            samples, ids = [], []
            for stream in streams:
                for sample, name in stream.take(len(share(self._window_size, self._spec.streams, stream.number))):
                    samples.append(sample)
                    ids.append(name)
            batch = self._collate(samples) if samples else None
        return Part(batch, tuple(ids), tuple((stream.number, *stream.at) for stream in streams), place)

    def filler(self) -> Any:
        """Return a batch of a sample or two, whichever; batch normalisation refuses a single one.

        Raises:
            UsageError: the data set has none.
        """
        for stream in range(self._spec.streams):
            opened = _ShardStream(self._dataset, self._spec, stream, self._cursor.epoch, (0, 0))
            samples = [sample for sample, _ in opened.take(2)]
            if samples:
                return self._collate(samples)
        raise UsageError(f"None of the {self._spec.shards} shards holds a sample; check what reads them.")


class _ShardStream:
    """One sequence of samples.

    Attributes:
        at: the shard's place in the stream, and samples read of it.
    """

    def __init__(self, dataset: ShardedDataset, spec: ShardSpec, number: int, epoch: int, at: tuple[int, int]) -> None:
        self._dataset = dataset
        self._spec = spec
        self._shards = spec.shards_of(number, epoch)
        self._reading: Iterator[Any] | None = None
        self.number = number
        self.at = at

    def take(self, count: int) -> Iterator[tuple[Any, int]]:
        """Yield the next samples, fewer at the stream's end, with their names."""
        while count and self.at[0] < len(self._shards):
            shard = self._shards[self.at[0]]
            if self._reading is None:
                self._reading = self._open(shard, self.at[1])
            for sample in islice(self._reading, 1):
                name = shard << 32 | self.at[1]
                self.at = (self.at[0], self.at[1] + 1)
                count -= 1
                yield sample, name
                break
            else:
                self._reading, self.at = None, (self.at[0] + 1, 0)

    def _open(self, shard: int, skip: int) -> Iterator[Any]:
        samples = self._dataset.shard(num_shards=self._spec.shards, index=shard)
        if skip and hasattr(samples, "skip"):
            return iter(samples.skip(skip))
        return islice(iter(samples), skip, None)
