"""The files of a checkpoint: which rank writes what, and their layout, that of safetensors files.

A file holds chunks of tensors. A whole tensor has its own name in the file; a part has the name with its offsets, such
as ``model/weight[128:256, 0:64]``. The file's metadata describes which part of which tensor each chunk is. The content
begins at a multiple of 64 bytes, and wider elements come first, so that every tensor is aligned in a mapped file.

Format: https://github.com/huggingface/safetensors#format

**Which rank writes what.** With data parallelism every rank holds the whole state; ``N`` ranks write it in an ``N``-th
of the time. A tensor that several ranks hold is cut along its first dimension, so that all ranks write about the same
number of bytes, including the shards that they alone hold.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from azureml_elastic.errors import CheckpointDamaged

_SMALLEST_BYTES = 1 << 16
"""Size up to which a tensor is not cut."""

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_METADATA = "__metadata__"
_PARTS = "azureml_elastic"
_NOTE = "azureml_elastic.note"
_LONGEST_HEADER_BYTES = 1 << 30  # a damaged length must not ask for all memory

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The data types of the format. Other types are stored as bytes, with one more dimension."""


@dataclass(frozen=True, order=True)
class Chunk:
    """A rectangular part of a tensor.

    Offsets and sizes are those of the part in each dimension, in elements; the shape is that of the whole tensor, and
    ``dtype`` is its data type without ``torch.``.
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
    # What one rank alone can write comes first, and what all can write last: that evens out the loads.
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
            # The last rank takes what is left, as cuts at whole rows do not meet the quotas exactly.
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


@dataclass(frozen=True)
class Entry:
    """A chunk of a tensor, and the offset of its first byte in a file."""

    chunk: Chunk
    begin: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.begin + self.chunk.nbytes


@dataclass(frozen=True)
class Layout:
    """The layout of a file to be written: its header with the length field, and the chunks that follow without gaps."""

    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.entries[-1].end if self.entries else len(self.header)

    @classmethod
    def of(cls, chunks: Iterable[Chunk], note: str | None = None) -> Layout:
        """Return the layout of a file with these chunks, and with a note (any text) in its header.

        Chunks of equally wide elements stay in this order.
        """
        # By alignment, the largest power of two that divides an element's size: none needs padding then.
        ordered = sorted(chunks, key=lambda chunk: -(chunk.itemsize & -chunk.itemsize))
        begins = list(accumulate((chunk.nbytes for chunk in ordered), initial=0))
        document: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        for chunk, begin in zip(ordered, begins, strict=False):
            name = _name(chunk)
            while name in document:  # a tensor may be called as a part of another one is
                name += "'"
            known = chunk.dtype in _DTYPES
            document[name] = {
                "dtype": _DTYPES.get(chunk.dtype, "U8"),
                "shape": [*chunk.sizes] if known else [*chunk.sizes, chunk.itemsize],
                "data_offsets": [begin, begin + chunk.nbytes],
            }
            parts[name] = [chunk.name, chunk.offsets, chunk.sizes, chunk.shape, chunk.dtype, chunk.itemsize]
        document[_METADATA] = {"format": "pt", _PARTS: json.dumps(parts, separators=(",", ":"))}
        if note is not None:
            document[_METADATA][_NOTE] = note
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(header, tuple(map(Entry, ordered, (len(header) + begin for begin in begins))))


def read_header(fill: Callable[[int, memoryview], None], where: str) -> tuple[list[Entry], str | None]:
    """Return the entries of a file and its note, which ``fill`` reads to memory from an offset on.

    Raises:
        CheckpointDamaged: this library did not write the header.
        OSError: the file cannot be read.
    """
    try:
        first = bytearray(_LENGTH_BYTES)
        fill(0, memoryview(first))
        length = int.from_bytes(first, "little")
        if not 0 < length <= _LONGEST_HEADER_BYTES:
            raise ValueError(f"its length is {length} bytes")  # noqa: TRY301
        text = bytearray(length)
        fill(_LENGTH_BYTES, memoryview(text))
        document: Mapping[str, Any] = json.loads(text)
        parts: Mapping[str, Any] = json.loads(document[_METADATA][_PARTS])
        entries = []
        for key, (name, offsets, sizes, shape, dtype, itemsize) in parts.items():
            chunk = Chunk(str(name), tuple(offsets), tuple(sizes), tuple(shape), str(dtype), int(itemsize))
            begin, end = document[key]["data_offsets"]
            if end - begin != chunk.nbytes:
                raise ValueError(f"{key} has {end - begin} bytes instead of {chunk.nbytes}")  # noqa: TRY301
            entries.append(Entry(chunk, _LENGTH_BYTES + length + begin))
        return entries, document[_METADATA].get(_NOTE)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"The header of {where} cannot be read, it is no file of tensors: {error!r}") from error


def _name(chunk: Chunk) -> str:
    if chunk.whole:
        return chunk.name
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{chunk.name}[{', '.join(ranges)}]"
