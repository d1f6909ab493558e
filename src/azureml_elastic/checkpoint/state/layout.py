"""The tensors of the state as ``torch.distributed.checkpoint`` sees them: boxes that this rank holds, or wants.

DCP's planners know every kind of tensor: plain ones, DTensors as FSDP2 has, and whatever else implements its protocol
(``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``). They do the geometry of resharding;
who writes a box, and to where, is decided in :mod:`azureml_elastic.checkpoint.format`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

from azureml_elastic.checkpoint.format.write_plan import Chunk
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["Piece", "Read", "held", "pieces", "reads", "require_complete", "signature"]

T = TypeVar("T")


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Return what the boxes of the tensors depend on, in a form to be compared."""
    return tuple(
        (name, type(tensor).__name__, tuple(tensor.shape), tensor.dtype, getattr(tensor, "placements", None))
        for name, tensor in tensors.items()
    )


def held(tensors: Mapping[str, torch.Tensor]) -> list[Chunk]:
    """Return the boxes that this rank holds; those that are empty are left out, but for tensors that are empty."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, is_coordinator=True)
    chunks = [_chunk(item) for item in planner.create_local_plan().items]
    return [chunk for chunk in chunks if chunk.nbytes or not all(chunk.shape)]


@dataclass(frozen=True)
class Piece:
    """A chunk that this rank writes, and where it holds it.

    Args:
        chunk: to be written.
        box: the offsets of the box in which it lies.
        row: of the box, along its first dimension.
    """

    chunk: Chunk
    box: tuple[int, ...]
    row: int

    def of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return it, a view of one of these tensors."""
        data: torch.Tensor = find_state_dict_object(tensors, MetadataIndex(self.chunk.name, torch.Size(self.box)))
        return data.narrow(0, self.row, self.chunk.sizes[0]) if self.chunk.sizes else data


def pieces(boxes: Iterable[Chunk], chunks: Iterable[Chunk]) -> list[Piece]:
    """Find the chunks that a rank was assigned in the boxes that it holds."""
    by_name: dict[str, list[Chunk]] = {}
    for box in boxes:
        by_name.setdefault(box.name, []).append(box)
    found = []
    for chunk in chunks:
        box = next(each for each in by_name[chunk.name] if _covers(each, chunk))
        found.append(Piece(chunk, box.offsets, chunk.offsets[0] - box.offsets[0] if chunk.sizes else 0))
    return found


@dataclass(frozen=True)
class Read:
    """A part of a stored chunk, and the memory that wants it.

    Args:
        source: which of the stored chunks.
        offsets: of the part within that chunk.
        sizes: of the part.
        target: a view of the wanted tensor, of these sizes.
    """

    source: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor


def reads(targets: Mapping[str, torch.Tensor], stored: Sequence[Chunk]) -> Iterator[Read]:
    """Return what is to be read so that the tensors have what is stored.

    Args:
        targets: to be filled, by name.
        stored: all chunks of a checkpoint.

    Raises:
        CheckpointDamaged: a tensor is not stored, or not all of it is.
    """
    numbers: dict[str, list[int]] = {}
    for number, chunk in enumerate(stored):
        numbers.setdefault(chunk.name, []).append(number)
    described: dict[str, Any] = {
        name: _describe([stored[number] for number in of_name]) for name, of_name in numbers.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), Metadata(described), is_coordinator=True)
    for item in planner.create_local_plan().items:
        index = item.storage_index
        assert index.index is not None
        yield Read(
            numbers[index.fqn][index.index],
            tuple(item.storage_offsets),
            tuple(item.lengths),
            planner.resolve_tensor(item).detach(),
        )


def require_complete(stored: Sequence[Chunk]) -> None:
    """Check that each stored tensor is stored whole.

    Raises:
        CheckpointDamaged: it is not.
    """
    counts: dict[str, int] = {}
    for chunk in stored:
        counts[chunk.name] = counts.get(chunk.name, 0) + chunk.nbytes
    for chunk in stored:
        whole = Chunk(chunk.name, (), chunk.shape, chunk.shape, chunk.dtype, chunk.itemsize).nbytes
        if counts[chunk.name] != whole:
            raise CheckpointDamaged(
                f"Of the {whole} bytes of {chunk.name!r} the checkpoint holds {counts[chunk.name]}."
            )


def _chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn!r} is no tensor")
    dtype = data.properties.dtype
    name = str(dtype).removeprefix("torch.")
    return Chunk(
        item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size), name, dtype.itemsize
    )


def _covers(box: Chunk, chunk: Chunk) -> bool:
    if not chunk.sizes:
        return True
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
