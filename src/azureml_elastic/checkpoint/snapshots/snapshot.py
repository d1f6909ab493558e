"""The state of a run in the memory of one process: for the next worker of the node, or for other ranks.

A worker whose round ends copies its state to anonymous memory (``memfd_create``), which the node's agent keeps open for
the next worker to map. Nothing is written to a disk, nothing is left behind when the agent ends, and the size of
``/dev/shm`` does not matter. The memory holds a file of :mod:`~azureml_elastic.checkpoint.format.shard_file`, of which
an agent that ends makes a checkpoint: see :mod:`~azureml_elastic.checkpoint.snapshots.handed_over`.

The memory is written, not mapped: the kernel need not clear pages that are overwritten as a whole, nor map each of them
for this process, which takes longer than the copy.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from azureml_elastic.checkpoint.format.shard_file import Chunk, Layout, read_header
from azureml_elastic.checkpoint.save.local_shard import StagingBuffer
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.layout import Piece, held, memory_of
from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import CheckpointDamaged

_BLOCK_BYTES = 8 << 20

_RANDOM = random_state.tensor_name(0)
"""Name of the tensor of :attr:`Snapshot.random`: as in a checkpoint, whose rank 0 continues these generators."""

_HOST = torch.device("cpu")


def position_key(data: Mapping[str, Any] | None) -> str:
    """Return a text that is equal for equal positions in the data."""
    return "" if data is None else json.dumps(data, sort_keys=True)


@dataclass(frozen=True)
class Snapshot:
    """The state of a run in one process: all of it, or the part of a sharded one that the process holds.

    Args:
        step: optimizer steps completed.
        state: tracked state without the tensors, see :mod:`~azureml_elastic.checkpoint.state.tree`.
        data: position in the data, ``None`` without a loader.
        unsaved_seconds: time since the last checkpoint on storage.
        save_pending: whether a checkpoint was begun and not committed.
        storage: path or URL of the run's checkpoints, empty where nothing else is to be known of them.
        parent: last committed checkpoint as JSON, ``None`` without one.
        classes: class of each tracked optimizer and learning rate scheduler, by name.
        origin: number of the round that completed the step, 0 if that is unknown.
        apart: names of tensors that may differ between ranks.
        random: random number generators of the process, uint8 (bytes,), see
            :func:`~azureml_elastic.checkpoint.state.random_state.capture`.
        tensors: what the process holds of the tensors, each of the shape of its chunk; they may alias the model's.
    """

    step: int
    state: Mapping[str, Any]
    data: Mapping[str, Any] | None
    unsaved_seconds: float = 0.0
    save_pending: bool = False
    storage: str = ""
    parent: Mapping[str, Any] | None = None
    classes: Mapping[str, str] = field(default_factory=dict)
    origin: int = 0
    apart: Sequence[str] = field(default_factory=list)
    random: torch.Tensor | None = None
    tensors: Mapping[Chunk, torch.Tensor] = field(default_factory=dict)

    def to_memory(self, device: torch.device = _HOST) -> int:
        """Return a descriptor of new memory that holds a copy of the tensors, which are on a device.

        Raises:
            OSError: there is not enough memory, or the system has no ``memfd_create``.
        """
        # Large tensors first: in the file there is no padding, and the small ones would misalign them.
        tensors = {**self.tensors, **({} if self.random is None else local_chunks({_RANDOM: self.random}))}
        layout = Layout.of(sorted(tensors, key=lambda chunk: -chunk.nbytes), json.dumps(self.header()))
        parts = [(entry.begin, tensors[entry.chunk]) for entry in layout.entries]
        if device_of(device).separate:  # such a device copies to pinned memory, which has to be mapped
            staging = StagingBuffer(device)
            staging.reserve(layout.nbytes)
            staging.put(0, layout.header)
            for begin, part in parts:
                staging.take(begin, part)
            staging.synchronize()
            descriptor = os.dup(staging.descriptor)
            staging.release()
            return descriptor
        descriptor = os.memfd_create("azureml-elastic-state", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, layout.nbytes)
            _put(descriptor, 0, memoryview(layout.header))
            for begin, part in parts:
                content = part.detach().cpu().contiguous()
                _put(descriptor, begin, memory_of(content))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def from_memory(cls, path: str) -> Snapshot:
        """Map what :meth:`to_memory` wrote; the tensors are views of private memory.

        Raises:
            CheckpointDamaged: the content is something else.
            OSError: the memory was released.
        """
        with Path(path).open("rb", buffering=0) as stream:
            # Private, as other processes read the same memory; writable, as torch warns of tensors that are not.
            memory = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

        def fill(begin: int, target: memoryview) -> None:
            target[:] = memory[begin : begin + len(target)]

        entries, note = read_header(fill, path)
        chunks = {}
        for entry in entries:
            dtype, sizes = getattr(torch, entry.chunk.dtype), entry.chunk.sizes
            count = entry.chunk.nbytes // entry.chunk.itemsize
            chunks[entry.chunk] = (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.begin).reshape(sizes)
                if count  # torch takes no memory without elements
                else torch.empty(sizes, dtype=dtype)
            )
        random = next((chunk for chunk in chunks if chunk.name == _RANDOM), None)
        try:
            header = json.loads(note or "")
            return cls(**header, random=None if random is None else chunks.pop(random), tensors=chunks)
        except (TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{path} holds no snapshot: {error}") from error

    @property
    def position(self) -> str:
        """The position in the data as text, see :func:`position_key`."""
        return position_key(self.data)

    def header(self) -> dict[str, Any]:
        """Return everything but tensors."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("random", "tensors")}


def _put(descriptor: int, begin: int, view: memoryview) -> None:
    while view:
        written = os.pwrite(descriptor, view[:_BLOCK_BYTES], begin)
        begin, view = begin + written, view[written:]


def local_chunks(tensors: Mapping[str, torch.Tensor]) -> dict[Chunk, torch.Tensor]:
    """Return what this process holds of tensors, each of its chunk's shape: plain ones whole, of others its shards."""
    found: dict[Chunk, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            found.update((box, Piece(box, box.offsets, 0).of({name: tensor})) for box in held({name: tensor}))
        else:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[Chunk.of_whole(name, tuple(tensor.shape), dtype, tensor.element_size())] = tensor
    return found
