"""Which samples an optimizer step trains, as pure functions of the position in the data.

The seed and the epoch determine one global order. A step trains the *window* ``order[consumed : consumed + size]``;
each rank takes a contiguous share of it, in one or several *micro-batches*. The position is therefore a
:class:`Cursor`, which advances only when a step is committed: after a crash the interrupted window is trained again.

**The random order** is computed element by element, without a list of all of them. A number below ``a * b`` is split
into two, below ``a`` and ``b``; alternately each is shifted by a hash of the other. Every such round is invertible, so
different numbers stay different. A result beyond the length goes through the rounds again until it is within; this
ends, for the same reason.

Sources: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), the generalised Feistel cipher
with cycle walking; the hash is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Self

from azureml_elastic.errors import UsageError

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Numbers = npt.NDArray[np.uint64]

_ALGORITHM = "feistel-8"
"""Name of the algorithm that makes an order from a seed; another algorithm needs another name."""

FILLER_SAMPLES = 2
"""Samples of a batch that does not count: batch normalisation refuses a single one."""

_Indices = npt.NDArray[np.int64]


class Permutation:
    """A permutation of ``range(length)``.

    Args:
        length: number of elements, at least 1 and below 2**62
        key: 64 bits; another key gives another permutation
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._a = math.isqrt(length - 1) + 1
        self._b = -(-length // self._a)
        self._keys = _mixed(np.array([(key + (number + 1) * _GOLDEN) & _MASK for number in range(_ROUNDS)], np.uint64))

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the elements, int64 (n,), at some positions, int64 (n,); the time depends on their number alone."""
        result = self._rounds(positions.astype(np.uint64))
        # Cycle walking. The product of both parts exceeds the length by less than a, one in about sqrt(length) numbers.
        while (beyond := np.flatnonzero(result >= self._length)).size:
            result[beyond] = self._rounds(result[beyond])
        return result.astype(np.int64)

    def _rounds(self, numbers: Numbers) -> Numbers:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = numbers // b, numbers % b
        for number in range(0, _ROUNDS, 2):
            left = (left + _mixed(right + self._keys[number]) % a) % a
            right = (right + _mixed(left + self._keys[number + 1]) % b) % b
        result: Numbers = left * b + right
        return result


def _mixed(numbers: Numbers) -> Numbers:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Numbers = numbers ^ (numbers >> np.uint64(31))
    return result


@dataclass(frozen=True)
class Cursor:
    """The position in one loader's data.

    Args:
        epoch: number of the epoch, from 0
        consumed: samples of this epoch that committed steps have trained
        streams: position of each shard stream: index of the shard in the stream, and number of samples read of it
    """

    epoch: int = 0
    consumed: int = 0
    streams: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> list[Any]:
        """Return the numbers, to be saved with a checkpoint."""
        return [self.epoch, self.consumed, *([list(map(list, self.streams))] if self.streams else [])]

    @classmethod
    def from_json(cls, document: list[Any]) -> Self:
        """Return the inverse of :meth:`to_json`."""
        epoch, consumed, *rest = document
        return cls(int(epoch), int(consumed), tuple((int(at), int(read)) for at, read in (rest[0] if rest else ())))


@dataclass(frozen=True, kw_only=True)
class LoaderSpec(ABC):
    """Properties of a loader's data that must not change over restarts, because its cursor depends on them.

    Args:
        global_batch_size: samples of one optimizer step over all ranks, at the reference world size
        seed: random seed of the order
        shuffle: whether the order is random; for a dataset in shards, the order of the shards
        drop_last: whether the incomplete window at the end of an epoch is left out
    """

    global_batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    @abstractmethod
    def over(self, cursor: Cursor) -> bool:
        """Return whether the epoch is known to have no more samples."""

    def at(self, epoch: int) -> Self:  # noqa: ARG002 - for subclasses
        """Return the properties that hold in an epoch."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the fields, to be saved with a checkpoint."""
        return asdict(self)

    def require_same(self, saved: Mapping[str, Any]) -> None:
        """Raise ``UsageError`` if the fields of a checkpoint differ from these."""
        here = self.to_json()
        changed = [
            f"{name} was {saved.get(name)!r} and is {here.get(name)!r}"
            for name in dict.fromkeys([*saved, *here])
            if saved.get(name) != here.get(name)
        ]
        if changed:
            raise UsageError(
                f"The data differ from those of the checkpoint: {', '.join(changed)}. Its position in the epoch does "
                "not apply to other data. Restore the former values, or start anew with an empty checkpoint folder."
            )


@dataclass(frozen=True)
class DataSpec(LoaderSpec):
    """Properties of a map-style dataset and its order.

    Args:
        accumulation: number of global batches of a step, by the first epoch with this number; 1 before all of them
    """

    length: int
    algorithm: str = _ALGORITHM
    accumulation: Mapping[str, int] = field(default_factory=dict)  # as in JSON, whose keys are text

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UsageError("The dataset is empty; check the path or the filter that made it.")
        if self.global_batch_size < 1:
            raise UsageError(
                f"global_batch_size={self.global_batch_size} is below the limit of 1; give the samples of one "
                "optimizer step over all ranks."
            )
        if self.usable == 0:
            raise UsageError(
                f"The dataset has {self.length} samples, fewer than global_batch_size={self.global_batch_size}, "
                "and drop_last=True drops them all. Lower global_batch_size or give drop_last=False."
            )

    @property
    def usable(self) -> int:
        """Samples that one epoch trains, at the global batch size."""
        return self.trained(0, self.global_batch_size)

    @property
    def windows(self) -> int:
        """Optimizer steps of one epoch, at the global batch size."""
        return -(-self.usable // self.global_batch_size)

    def trained(self, consumed: int, size: int) -> int:
        """Return the number of samples trained at the end of an epoch that continues with windows of this size."""
        return consumed + (self.length - consumed) // size * size if self.drop_last else self.length

    def window(self, consumed: int, size: int) -> range:
        """Return the positions in the epoch's order that the next step trains; empty at the epoch's end."""
        return range(consumed, max(consumed, min(consumed + size, self.trained(consumed, size))))

    def over(self, cursor: Cursor) -> bool:
        """Return whether the epoch has no more samples."""
        return cursor.consumed >= self.at(cursor.epoch).usable

    def at(self, epoch: int) -> Self:
        """Return the properties in an epoch, whose steps may be of several global batches."""
        if not self.accumulation:
            return self
        begun = [int(first) for first in self.accumulation if int(first) <= epoch]
        number = self.accumulation[str(max(begun))] if begun else 1
        return replace(self, global_batch_size=self.global_batch_size * number, accumulation={})


def order(spec: DataSpec, epoch: int) -> Callable[[_Indices], _Indices]:
    """Return the order of an epoch: a function from positions, int64 (n,), to indices in the dataset, int64 (n,)."""
    if not spec.shuffle:
        return lambda positions: positions
    return Permutation(spec.length, xxhash.xxh3_64_intdigest(f"{spec.seed}.{epoch}".encode()))


def share(count: int, world_size: int, rank: int) -> range:
    """Return a rank's part of ``range(count)``: contiguous, with sizes that differ by at most one."""
    quotient, rest = divmod(count, world_size)
    start = rank * quotient + min(rank, rest)
    return range(start, start + quotient + (rank < rest))


def parts(
    count: int,
    world_size: int,
    rank: int,
    *,
    logical_workers: int | None = None,
    most: int | None = None,
    number: int | None = None,
) -> list[range]:
    """Return a rank's micro-batches as parts of ``range(count)``; none if it has no sample.

    Args:
        count: samples of the window
        logical_workers: number of parts that the window is divided into first, so that the micro-batches are the same
            at any world size; ``None`` to divide it among the ranks
        most: limit on the samples of a micro-batch, ``None`` for no limit
        number: number of micro-batches in place of both, as far as the samples suffice; the first ones of all ranks
            are the first samples, as those of a stack that gives the ranks batch after batch
    """
    if number is not None:
        found = [_part(share(count, number, index), world_size, rank) for index in range(number)]
        return [each for each in found if each]
    if logical_workers is None:
        shares = [share(count, world_size, rank)]
    else:
        shares = [share(count, logical_workers, worker) for worker in share(logical_workers, world_size, rank)]
    found = []
    for whole in shares:
        pieces = 1 if most is None else -(-len(whole) // most)
        found += [_part(whole, pieces, index) for index in range(pieces)]
    return [each for each in found if each]


def _part(whole: range, number: int, index: int) -> range:
    part = share(len(whole), number, index)
    return whole[part.start : part.stop]


def weight(own: int, count: int, world_size: int) -> float:
    """Return the factor of a micro-batch's mean loss that makes the mean over the ranks the mean over the window.

    The required gradient is ``1/count * sum`` over the window. Data parallelism computes ``1/world_size * sum`` over
    the ranks, where each micro-batch contributes its mean, ``1/own * sum``.

    Args:
        own: samples of the micro-batch
        count: samples of the window
    """
    return own * world_size / count
