"""The state of a run in memory: handed from a worker to the one that follows it, or from one rank to another.

A worker whose round breaks puts its state into anonymous memory (``memfd_create``) and lets the node's agent hold on to
it; the worker that the agent starts next maps it. Nothing is written to a disk, nothing is left behind when the agent
dies, and the size of ``/dev/shm`` does not matter. The format: one line of JSON, padded, and the bytes of the tensors.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["RecoverableState", "Snapshot", "choose", "position_key"]

_ALIGNMENT = 64
_MAGIC = b"azureml-elastic snapshot 1\n"


@dataclass(frozen=True)
class RecoverableState:
    """The state that a rank could give to the others.

    Args:
        step: optimizer steps completed.
        round: in which they were.
        rank: that this process, or the one before it on this node, had in it.
        position: in the data, see :func:`position_key`.
        save_pending: whether a checkpoint of it was due and could not be completed.
    """

    step: int
    round: int
    rank: int
    position: str = ""
    save_pending: bool = False

    def same(self, other: RecoverableState | None) -> bool:
        """Whether both are the same state."""
        mine = (self.step, self.round, self.position)
        return other is not None and mine == (other.step, other.round, other.position)


def position_key(data: Mapping[str, Any] | None) -> str:
    """Name a position in the data, the same for the same."""
    return "" if data is None else json.dumps(data, sort_keys=True)


def choose(offers: list[RecoverableState | None], committed: int | None) -> int | None:
    """Return the rank whose state all ranks continue from.

    The furthest step wins: whoever has completed it has reduced the gradients of *all* ranks, also of one that died
    before it could say so. Of several, the state of the newest round and of the lowest rank is taken.

    Args:
        offers: by rank.
        committed: the step of the committed checkpoint, ``None`` where there is none.

    Returns:
        The rank, or ``None`` where the checkpoint is further, or there is no offer at all.
    """
    ranked = [(offer.step, offer.round, -offer.rank, -rank) for rank, offer in enumerate(offers) if offer is not None]
    if not ranked:
        return None
    step, _, _, rank = max(ranked)
    return None if committed is not None and committed > step else -rank


@dataclass(frozen=True)
class Snapshot:
    """A state, complete in one process.

    Args:
        step: optimizer steps completed.
        state: what is tracked, without the tensors, see :mod:`~azureml_elastic.checkpoint.state.tree`.
        data: the position in the data, ``None`` without a loader.
        unsaved_seconds: since the last checkpoint that is on storage.
        save_pending: whether a checkpoint was due and could not be completed.
        random: the random number generators of the process, see :mod:`~azureml_elastic.checkpoint.state.random_state`.
        tensors: by name; they may alias those of the model.
    """

    step: int
    state: Mapping[str, Any]
    data: Mapping[str, Any] | None
    unsaved_seconds: float = 0.0
    save_pending: bool = False
    random: str | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def to_memory(self) -> int:
        """Return the descriptor of anonymous memory that holds a copy.

        Raises:
            OSError: there is not enough memory, or the system has no ``memfd_create``.
        """
        header = {**self.header(), "tensors": {}}
        sources: list[tuple[int, torch.Tensor]] = []
        offset = 0
        for name, tensor in self.tensors.items():
            flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            header["tensors"][name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]
            sources.append((offset, flat))
            offset = _aligned(offset + flat.numel())
        text = _MAGIC + json.dumps(header).encode() + b"\n"
        start = _aligned(len(text))
        descriptor = os.memfd_create("azureml-elastic", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, start + max(offset, 1))  # an error here, not a SIGBUS below
            with mmap.mmap(descriptor, start + max(offset, 1)) as memory:
                memory[: len(text)] = text
                whole = torch.frombuffer(memory, dtype=torch.uint8)
                for place, flat in sources:
                    whole[start + place : start + place + flat.numel()].copy_(flat)
                del whole
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def from_memory(cls, path: str) -> Snapshot:
        """Map what :meth:`to_memory` wrote; the tensors are views of private memory.

        Raises:
            CheckpointDamaged: it is something else.
            OSError: it is gone.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        end = memory.find(b"\n", len(_MAGIC))
        if memory[: len(_MAGIC)] != _MAGIC or end < 0:
            raise CheckpointDamaged(f"{path} holds no state of a worker.")
        header = json.loads(memory[len(_MAGIC) : end])
        start = _aligned(end + 1)
        tensors = {}
        for name, (kind, shape, offset) in header.pop("tensors").items():
            count = 1
            for size in shape:
                count *= size
            dtype = getattr(torch, kind)
            empty = torch.empty(shape, dtype=dtype)
            if count:
                empty = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + offset).reshape(shape)
            tensors[name] = empty
        return cls(**header, tensors=tensors)

    @classmethod
    def broadcast(cls, own: Snapshot | None, source: int, control: ControlGroup) -> Snapshot:
        """Return the snapshot of one rank on all ranks. A collective.

        Args:
            own: this rank's, on the source at least.
            source: the rank whose it is.
            control: the ranks' agreement.
        """
        header: dict[str, Any] | None = None
        if control.rank == source:
            assert own is not None
            described = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in own.tensors.items()}
            header = {**own.header(), "tensors": described}
        header = control.from_rank(source, header)
        described = header.pop("tensors")
        tensors: dict[str, torch.Tensor] = {}
        for name, (kind, shape) in described.items():
            if control.rank == source:
                assert own is not None
                tensor = own.tensors[name].detach().cpu().contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, kind))
            if tensor.numel():
                control.broadcast(tensor.flatten().view(torch.uint8), source)
            tensors[name] = tensor
        return cls(**header, tensors=tensors)

    @property
    def position(self) -> str:
        """In the data, see :func:`position_key`."""
        return position_key(self.data)

    def header(self) -> dict[str, Any]:
        """Return everything but the tensors."""
        return {
            "step": self.step,
            "state": self.state,
            "data": self.data,
            "unsaved_seconds": self.unsaved_seconds,
            "save_pending": self.save_pending,
            "random": self.random,
        }


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
