"""This rank's shard of a checkpoint: its plan, agreed by all ranks, and its copy in memory."""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from azureml_elastic.checkpoint.format.shard_file import Layout
from azureml_elastic.checkpoint.format.write_plan import assign
from azureml_elastic.checkpoint.save.staging_buffer import StagingBuffer
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.layout import Piece, held, pieces, signature
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.process_groups import ProcessGroups

__all__ = ["LocalShard", "ShardCopy"]

_LOG = logging.getLogger(__name__)

_FAILED, _CHANGED, _SAME = range(3)


@dataclass(frozen=True)
class _Plan:
    """Plan of what this rank writes of a state.

    Args:
        form: signature of the tensors that the plan is for.
        layout: layout of this rank's file.
        pieces: local memory of the layout's entries, in their order.
        token: random text, the same on all ranks.
    """

    form: tuple[Any, ...]
    layout: Layout
    pieces: tuple[Piece, ...]
    token: str


@dataclass(frozen=True)
class ShardCopy:
    """A copy of a rank's shard: the content of its file, followed by optional bytes.

    Args:
        buffer: memory of the copy.
        nbytes: size of the file.
        tail: number of bytes that follow the file.
        empty: whether the file holds no tensors.
    """

    buffer: StagingBuffer
    nbytes: int
    tail: int
    empty: bool


class LocalShard:
    """The part of each checkpoint that this rank writes. For one thread.

    A plan is made anew only where the form of the state changes. With a spare buffer a copy may be held while the next
    one is made.
    """

    def __init__(self, groups: ProcessGroups, *, spare: bool = False) -> None:
        self._groups = groups
        self._buffers = [StagingBuffer(groups.device) for _ in range(2 if spare else 1)]
        self._held: StagingBuffer | None = None
        self._reserving: threading.Thread | None = None
        self._plan: _Plan | None = None
        self._attempts = 0

    def enter(self) -> None:
        """Forget the plan, which was made with the ranks of another round."""
        self._plan, self._attempts = None, 0

    def collect(self, state: TrackedState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state as JSON and as tensors, and plan the shards where the form changed. A collective.

        Raises:
            CheckpointError: a rank cannot collect its state; raised on all ranks.
        """
        control = self._groups.control
        failure: Exception | None = None
        plain: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        try:
            plain, tensors = state.collect(is_main=control.rank == 0)
            tensors[random_state.tensor_name(control.rank)] = random_state.capture(self._groups.device)
            verdict = _SAME if self._plan is not None and self._plan.form == signature(tensors) else _CHANGED
        except Exception as error:  # noqa: BLE001 - the other ranks must not wait for this one
            failure, verdict = error, _FAILED
        lowest = control.lowest(verdict)
        if lowest == _FAILED:
            control.together("Collecting the state", lambda: None, failure)
        if lowest == _CHANGED:
            plans = control.together("Planning the checkpoint", lambda: (held(tensors), secrets.token_hex(16)))
            layout = Layout.of(assign([boxes for boxes, _ in plans])[control.rank])
            parts = pieces(plans[control.rank][0], [entry.chunk for entry in layout.entries])
            self._plan = _Plan(signature(tensors), layout, tuple(parts), plans[0][1])
        return plain, tensors

    @property
    def nbytes(self) -> int:
        """Size of the planned shard in bytes."""
        assert self._plan is not None
        return self._plan.layout.nbytes

    def add_spare(self) -> None:
        """Have a spare buffer from now on."""
        if len(self._buffers) == 1:
            self._buffers.append(StagingBuffer(self._groups.device))

    def reserve(self) -> None:
        """Allocate the memory for a copy on a thread. No task may read a copy meanwhile."""
        if self._reserving is None:
            assert self._plan is not None
            nbytes = self._plan.layout.nbytes
            self._reserving = threading.Thread(target=self._reserve, args=(nbytes,), name="reserve-memory", daemon=True)
            self._reserving.start()

    def hold(self, copy: ShardCopy) -> None:
        """Preserve a copy until another one is held."""
        assert len(self._buffers) > 1
        self._held = copy.buffer

    def copy(self, tensors: dict[str, torch.Tensor], tail: bytes = b"") -> ShardCopy:
        """Copy the shard of :meth:`collect` to memory, over the previous copy that is not held, and append a tail.

        Raises:
            OSError: there is not enough memory.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        assert self._plan is not None
        layout = self._plan.layout
        buffer = next(each for each in self._buffers if each is not self._held)
        buffer.reserve(layout.nbytes + len(tail))
        buffer.put(0, layout.header)
        for entry, piece in zip(layout.entries, self._plan.pieces, strict=True):
            buffer.take(entry.begin, piece.of(tensors))
        buffer.put(layout.nbytes, tail)
        buffer.synchronize()
        return ShardCopy(buffer, layout.nbytes, len(tail), not layout.entries)

    def nonce(self) -> str:
        """Return 8 hexadecimal digits: new at each call, the same on all ranks after the same number of calls."""
        assert self._plan is not None
        self._attempts += 1
        return xxhash.xxh32_hexdigest(f"{self._plan.token}.{self._attempts}".encode())

    def _reserve(self, nbytes: int) -> None:
        try:
            for buffer in self._buffers:
                buffer.reserve(nbytes)
        except OSError as error:
            _LOG.warning("Memory for checkpoints of %d bytes cannot be allocated: %s", nbytes, error)
