"""Who writes what: every part of the state once, and each rank its share.

Data parallelism leaves the whole state on every rank. Written by one of them, a checkpoint takes as long as one disk or
one mount takes for all of it; spread over ``N`` ranks, a ``N``-th of that. A tensor that several ranks hold is cut
along its first dimension so that all ranks write about the same number of bytes, their own shards included. What one
rank holds alone it writes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Chunk", "assign"]

_CRUMB_BYTES = 1 << 16
"""A tensor of fewer bytes is not cut."""


@dataclass(frozen=True, order=True)
class Chunk:
    """A box of a tensor.

    Args:
        name: of the tensor.
        offsets: of the box in the tensor, in elements, one for each dimension.
        sizes: of the box, likewise.
        shape: of the whole tensor.
        dtype: its name, without ``torch.``.
        itemsize: bytes of an element.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The bytes of the box."""
        return prod(self.sizes) * self.itemsize

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.sizes == self.shape

    def rows(self, start: int, stop: int) -> Chunk:
        """Return a part of it.

        Args:
            start: first index along its first dimension.
            stop: the one after the last.
        """
        offsets = (self.offsets[0] + start, *self.offsets[1:])
        return Chunk(self.name, offsets, (stop - start, *self.sizes[1:]), self.shape, self.dtype, self.itemsize)


def assign(held: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Decide which rank writes which chunks.

    Args:
        held: by rank; several ranks may hold the same box, but boxes of different extent do not overlap.

    Returns:
        By rank, the chunks to write: together they are all that is held, each element once, and each is held by the
        rank that writes it. The same for the same arguments, in the order in which they are held.
    """
    owners: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(held):
        for chunk in chunks:
            owners.setdefault(chunk, []).append(rank)
    shared: dict[tuple[int, ...], list[Chunk]] = {}
    for chunk, ranks in owners.items():
        shared.setdefault(tuple(ranks), []).append(chunk)
    written: list[list[Chunk]] = [[] for _ in held]
    loads = [0] * len(held)
    for group in sorted(shared, key=lambda ranks: (len(ranks), ranks)):
        _spread(group, shared[group], written, loads)
    return written


def _spread(ranks: tuple[int, ...], chunks: list[Chunk], written: list[list[Chunk]], loads: list[int]) -> None:
    """Deal chunks that the same ranks hold out to them, so that the bytes of each come to about the same."""
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
    """Return about as many of the first rows as the quota has bytes, at least one, and the rest."""
    if chunk.nbytes <= max(quota, _CRUMB_BYTES) or not chunk.sizes:
        return chunk, None
    count = max(1, round(quota * chunk.sizes[0] / chunk.nbytes))
    if count >= chunk.sizes[0]:
        return chunk, None
    return chunk.rows(0, count), chunk.rows(count, chunk.sizes[0])


def _quotas(loads: list[int], total: int) -> list[int]:
    """Return how many bytes each rank gets so that the fullest are filled last, as water would."""
    quotas = [0] * len(loads)
    order = sorted(range(len(loads)), key=lambda rank: loads[rank])
    left = total
    for count, rank in enumerate(order, 1):
        above = loads[order[count]] - loads[rank] if count < len(order) else None
        step = left // count if above is None else min(above, left // count)
        for lower in order[:count]:
            quotas[lower] += step
        left -= step * count
    quotas[order[-1]] += left
    return quotas
