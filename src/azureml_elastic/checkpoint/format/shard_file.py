"""The layout of a file of tensors: a safetensors file, readable without this library.

A file holds chunks of tensors. A whole tensor has its own name in the file; a part has the name with its offsets, such
as ``model/weight[128:256, 0:64]``. The file's metadata describes which part of which tensor each chunk is. The content
begins at a multiple of 64 bytes, and wider elements come first, so that every tensor is aligned in a mapped file.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from azureml_elastic.checkpoint.format.write_plan import Chunk
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["Entry", "Layout", "read_header"]

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_METADATA = "__metadata__"
_PARTS = "azureml_elastic"
_NOTE = "azureml_elastic.note"
_LONGEST_HEADER_BYTES = 1 << 30

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
        ordered = sorted(chunks, key=lambda chunk: -(chunk.itemsize & -chunk.itemsize))  # by alignment
        begins = list(accumulate((chunk.nbytes for chunk in ordered), initial=0))
        document: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        for chunk, begin in zip(ordered, begins, strict=False):
            name = _name(chunk)
            while name in document:
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
