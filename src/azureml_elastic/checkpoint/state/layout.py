"""The chunks of tensors that this rank holds or reads, computed by the planners of ``torch.distributed.checkpoint``.

The planners support plain tensors, DTensors (FSDP2), and all that implement their protocol (``__create_write_items__``,
``__create_chunk_list__``, ``__get_tensor_shard__``), and compute the geometry of resharding. Which rank writes a chunk,
and to which file, is decided in :mod:`azureml_elastic.checkpoint.format`.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from azureml_elastic.checkpoint.format.shard_file import Chunk


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any shape and type, for writing; the tensor must outlive them."""
    # Not through NumPy, which has no bfloat16.
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Return a comparable value of all that the chunks of the tensors depend on."""
    return tuple(
        (name, type(tensor).__name__, tuple(tensor.shape), tensor.dtype, getattr(tensor, "placements", None))
        for name, tensor in tensors.items()
    )


def held(tensors: Mapping[str, torch.Tensor]) -> list[Chunk]:
    """Return the chunks that this rank holds, without empty chunks of tensors that are not empty."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, is_coordinator=True)
    chunks = [_chunk(item) for item in planner.create_local_plan().items]
    return [chunk for chunk in chunks if chunk.nbytes or not all(chunk.shape)]


@dataclass(frozen=True)
class Piece:
    """A chunk to write, the offsets of the held chunk (the box) that contains it, and its first row in that."""

    chunk: Chunk
    box: tuple[int, ...]
    row: int

    def of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the chunk as a view, (sizes of the chunk), of this rank's part of one of these tensors."""
        data: torch.Tensor = find_state_dict_object(tensors, MetadataIndex(self.chunk.name, torch.Size(self.box)))
        return data.narrow(0, self.row, self.chunk.sizes[0]) if self.chunk.sizes else data


def pieces(boxes: Iterable[Chunk], chunks: Iterable[Chunk]) -> list[Piece]:
    """Locate the chunks that a rank writes in the chunks that it holds."""
    by_name: defaultdict[str, list[Chunk]] = defaultdict(list)
    for box in boxes:
        by_name[box.name].append(box)
    found = []
    for chunk in chunks:
        box = next(each for each in by_name[chunk.name] if _covers(each, chunk))
        found.append(Piece(chunk, box.offsets, chunk.offsets[0] - box.offsets[0] if chunk.sizes else 0))
    return found


@dataclass(frozen=True)
class Read:
    """A part of a stored chunk, and its destination.

    Args:
        source: index of the stored chunk.
        offsets: offsets of the part in that chunk, in elements of each dimension.
        sizes: sizes of the part, likewise.
        target: view of the destination, of shape ``sizes`` and of the chunk's type.
    """

    source: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor


def reads(targets: Mapping[str, torch.Tensor], stored: Sequence[Chunk]) -> Iterator[Read]:
    """Yield the reads that fill tensors by name from all chunks of a checkpoint.

    Raises:
        CheckpointDamaged: a tensor or a part of it is not stored.
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, chunk in enumerate(stored):
        numbers[chunk.name].append(number)
    described: dict[str, Any] = {name: _describe([stored[each] for each in found]) for name, found in numbers.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), Metadata(described), is_coordinator=True)
    for item in planner.create_local_plan().items:
        index = item.storage_index  # with the number of the chunk among those of its tensor
        assert index.index is not None
        part = tuple(item.storage_offsets), tuple(item.lengths)
        yield Read(numbers[index.fqn][index.index], *part, planner.resolve_tensor(item).detach())


def incomplete(chunks: Iterable[Chunk]) -> dict[str, tuple[int, int]]:
    """Return the tensors that chunks do not make up, by name, with the bytes found and those of the whole."""
    found: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for chunk in chunks:
        found[chunk.name] += chunk.nbytes
        whole[chunk.name] = prod(chunk.shape) * chunk.itemsize
    return {name: (found[name], nbytes) for name, nbytes in whole.items() if found[name] != nbytes}


def _chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn!r} is not a tensor")
    dtype, box = data.properties.dtype, (tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size))
    return Chunk(item.index.fqn, *box, str(dtype).removeprefix("torch."), dtype.itemsize)


def _covers(box: Chunk, chunk: Chunk) -> bool:
    if not chunk.sizes:
        return True
    # Chunks are rows of boxes: they are cut along the first dimension alone.
    first, last = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
    return (
        box.offsets[1:] == chunk.offsets[1:]
        and box.sizes[1:] == chunk.sizes[1:]
        and box.offsets[0] <= first
        and last <= box.offsets[0] + box.sizes[0]
    )


def _describe(chunks: Sequence[Chunk]) -> TensorStorageMetadata:
    first = chunks[0]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, first.dtype)),
        torch.Size(first.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks],
    )
