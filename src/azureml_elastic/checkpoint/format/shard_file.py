"""The layout of a file of tensors: a safetensors file, readable without this library.

A file holds chunks of tensors. A whole tensor has its own name in the file; a part has the name with its offsets, such
as ``model/weight[128:256, 0:64]``. The file's metadata describes which part of which tensor each chunk is. The content
begins at a multiple of 64 bytes, and wider elements come first, so that every tensor is aligned in a mapped file.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from azureml_elastic.checkpoint.format.write_plan import Chunk
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["HEADER_LENGTH_BYTES", "Entry", "Layout", "header_length", "read_header", "read_note"]

HEADER_LENGTH_BYTES = 8
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
    """A chunk and its offset in a file.

    Args:
        chunk: chunk of a tensor.
        begin: offset of its first byte in the file.
    """

    chunk: Chunk
    begin: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.begin + self.chunk.nbytes


@dataclass(frozen=True)
class Layout:
    """The layout of a file to be written.

    Args:
        header: first bytes of the file, including the length field.
        entries: chunks that follow, without gaps.
    """

    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.entries[-1].end if self.entries else len(self.header)

    @classmethod
    def of(cls, chunks: Iterable[Chunk], note: str | None = None) -> Layout:
        """Return the layout of a file with these chunks.

        Args:
            chunks: chunks to store; those of equally wide elements stay in this order.
            note: text to store in the header, see :func:`read_note`.
        """
        ordered = sorted(chunks, key=lambda chunk: -_alignment(chunk.itemsize))
        document: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        places = []
        offset = 0
        for chunk in ordered:
            name = _name(chunk)
            while name in document:
                name += "'"
            known = chunk.dtype in _DTYPES
            document[name] = {
                "dtype": _DTYPES.get(chunk.dtype, "U8"),
                "shape": [*chunk.sizes] if known else [*chunk.sizes, chunk.itemsize],
                "data_offsets": [offset, offset + chunk.nbytes],
            }
            parts[name] = [chunk.name, chunk.offsets, chunk.sizes, chunk.shape, chunk.dtype, chunk.itemsize]
            places.append(offset)
            offset += chunk.nbytes
        document[_METADATA] = {"format": "pt", _PARTS: json.dumps(parts, separators=(",", ":"))}
        if note is not None:
            document[_METADATA][_NOTE] = note
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-(HEADER_LENGTH_BYTES + len(text)) % _ALIGNMENT)
        header = len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text
        entries = (Entry(chunk, len(header) + place) for chunk, place in zip(ordered, places, strict=True))
        return cls(header, tuple(entries))


def header_length(first: bytes, where: str) -> int:
    """Return the length of the header's text, read from the first bytes of the file.

    Raises:
        CheckpointDamaged: the length is not plausible.
    """
    length = int.from_bytes(first, "little")
    if len(first) != HEADER_LENGTH_BYTES or not 0 < length <= _LONGEST_HEADER_BYTES:
        raise CheckpointDamaged(f"{where} is no file of tensors: the length of its header is {length} bytes.")
    return length


def read_header(text: bytes, where: str) -> list[Entry]:
    """Return the entries of a file.

    Args:
        text: header without the length field.
        where: location of the file, for error messages.

    Raises:
        CheckpointDamaged: this library did not write the header.
    """
    begin = HEADER_LENGTH_BYTES + len(text)
    try:
        document: Mapping[str, Any] = json.loads(text)
        parts: Mapping[str, Any] = json.loads(document[_METADATA][_PARTS])
        entries = []
        for key, (name, offsets, sizes, shape, dtype, itemsize) in parts.items():
            chunk = Chunk(str(name), tuple(offsets), tuple(sizes), tuple(shape), str(dtype), int(itemsize))
            first, last = document[key]["data_offsets"]
            if last - first != chunk.nbytes:
                raise ValueError(f"{key} has {last - first} bytes instead of {chunk.nbytes}")  # noqa: TRY301
            entries.append(Entry(chunk, begin + first))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"The header of {where} cannot be read: {error!r}") from error
    return entries


def read_note(text: bytes, where: str) -> str:
    """Return the note of a file, see :meth:`Layout.of`.

    Args:
        text: header without the length field.
        where: location of the file, for error messages.

    Raises:
        CheckpointDamaged: the header has no note.
    """
    try:
        note: str = json.loads(text)[_METADATA][_NOTE]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"The header of {where} has no note: {error!r}") from error
    return note


def _name(chunk: Chunk) -> str:
    if chunk.whole:
        return chunk.name
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{chunk.name}[{', '.join(ranges)}]"


def _alignment(itemsize: int) -> int:
    """Return the largest power of two that divides the size of an element."""
    return itemsize & -itemsize
