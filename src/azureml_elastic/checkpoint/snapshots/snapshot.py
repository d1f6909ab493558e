"""The state of a run in the memory of one process: for the next worker of the node, or for other ranks.

A worker whose round ends copies its state to anonymous memory (``memfd_create``), which the node's agent keeps open for
the next worker to map. Nothing is written to a disk, nothing is left behind when the agent ends, and the size of
``/dev/shm`` does not matter. The memory holds a file of :mod:`~azureml_elastic.checkpoint.format.shard_file`, of which
an agent that ends makes a checkpoint: see :mod:`~azureml_elastic.checkpoint.snapshots.handed_over`.

The memory is written, not mapped: the kernel need not clear pages that are overwritten as a whole, nor map each of them
for this process, which takes longer than the copy.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from azureml_elastic.checkpoint.format.shard_file import Chunk, Layout, read_header
from azureml_elastic.checkpoint.load.reading import targets_for
from azureml_elastic.checkpoint.save.local_shard import StagingBuffer
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.layout import Piece, held, memory_of
from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import CheckpointDamaged

_BLOCK_BYTES = 8 << 20

_RANDOM = random_state.tensor_name(0)
"""Name of the tensor of :attr:`Snapshot.random`: as in a checkpoint, whose rank 0 continues these generators."""

_HOST = torch.device("cpu")


class AnonymousMemory:
    """Memory of a fixed size (``memfd_create``), which lives as long as a process has a descriptor of it.

    Attributes:
        descriptor: descriptor of the memory; -1 after its release.

    Raises:
        OSError: the system has none.
    """

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("azureml-elastic-state", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
        except OSError:
            self.release()
            raise

    def put(self, begin: int, content: bytes | memoryview) -> None:
        """Write bytes to an offset.

        Raises:
            OSError: there is not enough memory.
        """
        view = memoryview(content)
        while view:
            written = os.pwrite(self.descriptor, view[:_BLOCK_BYTES], begin)
            begin, view = begin + written, view[written:]

    def put_tensor(self, begin: int, tensor: torch.Tensor) -> None:
        """Write the elements of a tensor to an offset.

        Raises:
            OSError: there is not enough memory.
        """
        content = tensor.detach().cpu().contiguous()
        self.put(begin, memory_of(content))

    def release(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()


@dataclass(frozen=True)
class RecoverableState:
    """Description of a state that a rank can send to the others. Equal ones describe the same state.

    Args:
        rank: rank in that round of this process, or of its predecessor on this node.
        position: position in the data, see :func:`position_key`.
        save_pending: whether a checkpoint of it was begun and not committed.
    """

    step: int
    round: int
    rank: int = field(compare=False)
    position: str = ""
    save_pending: bool = field(default=False, compare=False)


def position_key(data: Mapping[str, Any] | None) -> str:
    """Return a text that is equal for equal positions in the data."""
    return "" if data is None else json.dumps(data, sort_keys=True)


def choose(states: list[RecoverableState | None], committed: int | None) -> int | None:
    """Return the rank whose state all ranks continue from.

    The furthest step wins: a rank that completed it has reduced the gradients of *all* ranks, also of one that died
    before it could report so. Of several, the state of the newest round and of the lowest rank is taken.

    Returns:
        The rank, or ``None`` where no rank has a state or the step of the committed checkpoint is higher.
    """
    ranked = [(state.step, state.round, -state.rank, -rank) for rank, state in enumerate(states) if state is not None]
    step, _, _, rank = max(ranked, default=(-1, 0, 0, 0))
    return None if not ranked or step < (committed or 0) else -rank


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a run in one process.

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
        random: random number generators of the process, see :mod:`~azureml_elastic.checkpoint.state.random_state`.
        tensors: tensors by name; they may alias those of the model.
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
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def to_memory(self, device: torch.device = _HOST) -> AnonymousMemory | StagingBuffer:
        """Return memory that holds a copy of the tensors of a device, of a sharded one that of this process's shard.

        Raises:
            OSError: there is not enough memory, or the system has no ``memfd_create``.
        """
        # Large tensors first: in the file there is no padding, and the small ones would misalign them.
        tensors = {**self.tensors, **({} if self.random is None else {_RANDOM: self.random})}
        boxes = (box for name, tensor in tensors.items() for box in _boxes(name, tensor))
        layout = Layout.of(sorted(boxes, key=lambda box: -box.nbytes), json.dumps(self.header()))
        parts = [(entry.begin, Piece(entry.chunk, entry.chunk.offsets, 0).of(tensors)) for entry in layout.entries]
        if device_of(device).separate:  # such a device copies to pinned memory, which has to be mapped
            staging = StagingBuffer(device)
            staging.reserve(layout.nbytes)
            staging.put(0, layout.header)
            for begin, part in parts:
                staging.take(begin, part)
            staging.synchronize()
            return staging
        memory = AnonymousMemory(layout.nbytes)
        try:
            memory.put(0, layout.header)
            for begin, part in parts:
                memory.put_tensor(begin, part)
        except BaseException:
            memory.release()
            raise
        return memory

    @classmethod
    def from_memory(cls, path: str) -> Snapshot:
        """Map what :meth:`to_memory` wrote of a whole state; the tensors are views of private memory.

        Raises:
            CheckpointDamaged: the content is something else.
            OSError: the memory was released.
        """
        header, chunks = cls.map_memory(path)
        return replace(header, tensors={chunk.name: tensor for chunk, tensor in chunks.items()})

    @classmethod
    def map_memory(cls, path: str) -> tuple[Snapshot, dict[Chunk, torch.Tensor]]:
        """Map what :meth:`to_memory` wrote: everything but the tensors, and the parts of these as views.

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
            return cls(**json.loads(note or ""), random=None if random is None else chunks.pop(random)), chunks
        except (TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{path} holds no snapshot: {error}") from error

    def copied_into(self, present: Mapping[str, torch.Tensor]) -> Snapshot:
        """Return this state with its tensors copied, into those that are present or new ones where these do not fit.

        An optimizer takes over the very tensors that it is given. If they were those of the mapped memory, its next
        step would copy each of their pages after a fault, which takes longer.

        Raises:
            CheckpointError: this process has no memory for them.
        """
        tensors = targets_for(itertools.starmap(chunk_of, self.tensors.items()), present, self.step)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.tensors[name])
        return replace(self, tensors=tensors)

    @property
    def position(self) -> str:
        """The position in the data as text, see :func:`position_key`."""
        return position_key(self.data)

    def header(self) -> dict[str, Any]:
        """Return everything but tensors."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("random", "tensors")}


def chunk_of(name: str, tensor: torch.Tensor) -> Chunk:
    """Return the description of a whole tensor."""
    return Chunk.of_whole(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def _boxes(name: str, tensor: torch.Tensor) -> list[Chunk]:
    """Return the parts of a tensor that this process holds."""
    return held({name: tensor}) if isinstance(tensor, DTensor) else [chunk_of(name, tensor)]
