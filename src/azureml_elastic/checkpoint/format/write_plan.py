"""The assignment of a checkpoint's chunks to the ranks that write them.

With data parallelism every rank holds the whole state; ``N`` ranks write it in an ``N``-th of the time. A tensor that
several ranks hold is cut along its first dimension, so that all ranks write about the same number of bytes, including
the shards that they alone hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Chunk", "assign"]

_SMALLEST_BYTES = 1 << 16
"""Size up to which a tensor is not cut."""


@dataclass(frozen=True, order=True)
class Chunk:
    """A rectangular part of a tensor.

    Args:
        name: name of the tensor.
        offsets: offset of the part in each dimension, in elements.
        sizes: size of the part in each dimension, in elements.
        shape: shape of the whole tensor.
        dtype: data type without ``torch.``.
        itemsize: size of an element in bytes.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @classmethod
    def of_whole(cls, name: str, shape: tuple[int, ...], dtype: str, itemsize: int) -> Chunk:
        """Return a whole tensor."""
        return cls(name, (0,) * len(shape), shape, shape, dtype, itemsize)

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return prod(self.sizes) * self.itemsize

    @property
    def whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return self.sizes == self.shape

    def rows(self, start: int, stop: int) -> Chunk:
        """Return the rows from ``start`` to before ``stop`` along the first dimension."""
        offsets = (self.offsets[0] + start, *self.offsets[1:])
        return Chunk(self.name, offsets, (stop - start, *self.sizes[1:]), self.shape, self.dtype, self.itemsize)


def assign(held: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Return the chunks that each rank writes: a deterministic partition of all that is held.

    ``held`` has the chunks that each rank holds, and may write. Those of several ranks are equal or do not overlap.
    """
    owners: defaultdict[Chunk, list[int]] = defaultdict(list)
    for rank, chunks in enumerate(held):
        for chunk in chunks:
            owners[chunk].append(rank)
    shared: defaultdict[tuple[int, ...], list[Chunk]] = defaultdict(list)
    for chunk, ranks in owners.items():
        shared[tuple(ranks)].append(chunk)
    written: list[list[Chunk]] = [[] for _ in held]
    loads = [0] * len(held)
    for group in sorted(shared, key=lambda ranks: (len(ranks), ranks)):
        _spread(group, shared[group], written, loads)
    return written


def _spread(ranks: tuple[int, ...], chunks: list[Chunk], written: list[list[Chunk]], loads: list[int]) -> None:
    """Distribute chunks over the ranks that hold them, so that all ranks write about as many bytes."""
    quotas = _quotas([loads[rank] for rank in ranks], sum(chunk.nbytes for chunk in chunks))
    turn = 0
    for whole in chunks:
        rest: Chunk | None = whole
        while rest is not None:
            while turn < len(ranks) - 1 and quotas[turn] <= 0:
                turn += 1
            chunk, rest = _cut(rest, quotas[turn] if turn < len(ranks) - 1 else rest.nbytes)
            written[ranks[turn]].append(chunk)
            loads[ranks[turn]] += chunk.nbytes
            quotas[turn] -= chunk.nbytes


def _cut(chunk: Chunk, quota: int) -> tuple[Chunk, Chunk | None]:
    """Return the first rows, about as many as the quota has bytes and at least one, and the rest."""
    if chunk.nbytes > max(quota, _SMALLEST_BYTES) and chunk.sizes:
        count = max(1, round(quota * chunk.sizes[0] / chunk.nbytes))
        if count < chunk.sizes[0]:
            return chunk.rows(0, count), chunk.rows(count, chunk.sizes[0])
    return chunk, None


def _quotas(loads: list[int], total: int) -> list[int]:
    """Return the bytes for each rank so that the loads become as equal as possible (water-filling)."""
    quotas = [0] * len(loads)
    order, left = sorted(range(len(loads)), key=loads.__getitem__), total
    for count, rank in enumerate(order, 1):
        above = loads[order[count]] - loads[rank] if count < len(order) else None
        step = left // count if above is None else min(above, left // count)
        for lower in order[:count]:
            quotas[lower] += step
        left -= step * count
    quotas[order[-1]] += left
    return quotas
