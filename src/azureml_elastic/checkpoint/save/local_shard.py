"""This rank's shard of a checkpoint: its plan, agreed by all ranks, and its copy in memory.

Training waits for this copy only. The memory is allocated once, while training goes on, and reused: the page faults of
fresh memory cost several times as much as the copy. It is shared and anonymous (``memfd_create``), so that nothing is
left behind when the process dies. For a GPU it is pinned, so that the device copies to it without the host.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from azureml_elastic.checkpoint.format.shard_file import Layout, assign
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.layout import Piece, held, pieces, signature
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.process_groups import ProcessGroups

_SPARE = 1.05
"""Factor of the allocated to the requested size: states grow a little, and fresh memory is slow."""

_PIECE_BYTES = 1 << 23
_MADV_POPULATE_WRITE = 23  # not among Python's names

_LOG = logging.getLogger(__name__)

_FAILED, _CHANGED, _SAME = range(3)  # the lowest of all ranks' verdicts counts


class StagingBuffer:
    """A reusable buffer of shared memory for tensors of a device. For one thread at a time.

    Attributes:
        descriptor: descriptor of the memory, for another process to open; -1 without memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._memory: mmap.mmap | None = None
        self.descriptor = -1
        self._bytes: torch.Tensor | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """The size of the buffer."""
        return 0 if self._bytes is None else self._bytes.numel()

    def reserve(self, nbytes: int) -> None:
        """Allocate at least this size in bytes; the content may be lost.

        Raises:
            OSError: there is not enough memory.
        """
        if nbytes <= self.nbytes:
            return
        self.release()
        size = -(-int(nbytes * _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create("azureml-elastic-staging", os.MFD_CLOEXEC)
        os.posix_fallocate(self.descriptor, 0, size)  # an error here, not a SIGBUS later
        self._memory = mmap.mmap(self.descriptor, size)
        with contextlib.suppress(OSError, ValueError):  # before Linux 5.14
            for begin in range(0, size, _PIECE_BYTES):  # in pieces: each call blocks the interpreter
                self._memory.madvise(_MADV_POPULATE_WRITE, begin, min(_PIECE_BYTES, size - begin))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = self._device.pin(self._bytes)

    def view(self, begin: int, end: int) -> memoryview:
        """Return a part of the buffer, for reading."""
        assert self._memory is not None
        return memoryview(self._memory)[begin:end]

    def put(self, begin: int, content: bytes) -> None:
        """Copy bytes to an offset."""
        assert self._memory is not None
        self._memory[begin : begin + len(content)] = content

    def take(self, begin: int, tensor: torch.Tensor) -> None:
        """Copy a tensor of any shape and type to an offset in bytes; from a GPU without waiting, see `synchronize`."""
        assert self._bytes is not None
        if tensor.numel() == 0:
            return
        source = tensor.detach()
        size = source.numel() * source.element_size()
        target = self._bytes[begin : begin + size]
        if begin % source.element_size() == 0:  # torch views bytes as wider elements at multiples of these alone
            target = target.view(source.dtype).view(source.shape)
        else:  # such as an element of three bytes
            source = source.contiguous().view(torch.uint8).flatten()
        self._device.copy_out(target, source, pinned=self._pinned)

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        self._device.synchronize()

    def release(self) -> None:
        """Free the memory; views of it keep it alive."""
        # First, as CUDA holds the pages until then: what is mapped there next could not be pinned.
        if self._bytes is not None and self._pinned:
            self._device.unpin(self._bytes)
        self._bytes, self._memory, self._pinned = None, None, False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter CUDA may be unusable already
            self.release()


@dataclass(frozen=True)
class _Plan:
    """Plan of what this rank writes of a state.

    Args:
        form: signature of the tensors that the plan is for.
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
        # One number, instead of every rank's chunks at every save: the plan is almost always that of the last one.
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
            arguments = (self.nbytes,)
            self._reserving = threading.Thread(target=self._reserve, args=arguments, name="reserve-memory", daemon=True)
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
        # All copies are queued before one is waited for, so that a GPU makes them back to back.
        for entry, piece in zip(layout.entries, self._plan.pieces, strict=True):
            buffer.take(entry.begin, piece.of(tensors))
        buffer.put(layout.nbytes, tail)
        buffer.synchronize()
        return ShardCopy(buffer, layout.nbytes, len(tail), not layout.entries)

    def nonce(self) -> str:
        """Return 8 hexadecimal digits: new at each call, the same on all ranks after the same number of calls."""
        assert self._plan is not None
        # Counted instead of agreed, so that a save does not wait for another collective.
        self._attempts += 1
        return xxhash.xxh32_hexdigest(f"{self._plan.token}.{self._attempts}".encode())

    def _reserve(self, nbytes: int) -> None:
        try:
            for buffer in self._buffers:
                buffer.reserve(nbytes)
        except OSError as error:  # the save tries again, and reports it
            _LOG.warning("Memory for checkpoints of %d bytes cannot be allocated: %s", nbytes, error)
