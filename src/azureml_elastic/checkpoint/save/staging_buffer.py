"""Memory that a checkpoint is copied to before it is written: the copy is all that training waits for.

The memory is allocated once and kept warm. Fresh memory costs a page fault every 4 KiB, several times as much as the
copy itself, so it is made while training goes on, and reused. It is shared and has no name (``memfd_create``): nothing
is left behind when the process dies. On CUDA it is pinned, so that the device copies to it by itself.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from typing import Any

import torch

__all__ = ["StagingBuffer"]

_LOG = logging.getLogger(__name__)

_SPARE = 1.05
"""What is allocated beyond the need of the moment: states grow a little, and fresh memory is slow."""

_PIECE = 1 << 23
_MADV_POPULATE_WRITE = 23  # not among Python's names


class StagingBuffer:
    """The memory of one process. For one thread at a time.

    Args:
        device: that the tensors to be copied are on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: mmap.mmap | None = None
        self._descriptor = -1
        self._bytes: torch.Tensor | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return 0 if self._bytes is None else self._bytes.numel()

    def reserve(self, nbytes: int) -> None:
        """Have at least so much, all of it backed by memory. What was in it before may be lost.

        Raises:
            OSError: there is not enough.
        """
        if nbytes <= self.nbytes:
            return
        self.release()
        size = -(-int(nbytes * _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._descriptor = os.memfd_create("azureml-elastic-staging", os.MFD_CLOEXEC)
        os.posix_fallocate(self._descriptor, 0, size)  # an error here, not a SIGBUS later
        self._memory = mmap.mmap(self._descriptor, size)
        self._populate(size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pin()

    @property
    def descriptor(self) -> int:
        """Of the memory, for another process to open; open as long as the memory is here."""
        return self._descriptor

    def view(self, begin: int, end: int) -> memoryview:
        """Return a part of it, for reading."""
        assert self._memory is not None
        return memoryview(self._memory)[begin:end]

    def put(self, begin: int, content: bytes) -> None:
        """Copy bytes to a place."""
        assert self._memory is not None
        self._memory[begin : begin + len(content)] = content

    def take(self, begin: int, tensor: torch.Tensor) -> None:
        """Copy a tensor to a place, at a byte that is a multiple of its elements' alignment.

        On CUDA the copy is under way when this returns, until :meth:`settle`.
        """
        assert self._bytes is not None
        if tensor.numel() == 0:
            return
        source = tensor.detach()
        size = source.numel() * source.element_size()
        target = self._bytes[begin : begin + size]
        if begin % source.element_size() == 0:
            target.view(source.dtype).view(source.shape).copy_(source, non_blocking=self._pinned)
        else:  # an element of three bytes, say
            target.copy_(source.contiguous().view(torch.uint8).flatten(), non_blocking=self._pinned)

    def settle(self) -> None:
        """Wait until all copies are done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        """Give the memory back."""
        if self._bytes is not None and self._pinned:
            _runtime().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes, self._pinned = None, False
        # Whatever still has a view of it keeps it alive.
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def tensor(self, begin: int, end: int) -> torch.Tensor:
        """Return a part of it as bytes."""
        assert self._bytes is not None
        return self._bytes[begin:end]

    def __del__(self) -> None:
        """Give it back."""
        with contextlib.suppress(Exception):  # the interpreter may have taken CUDA apart before
            self.release()

    def _populate(self, size: int) -> None:
        """Map it, piece by piece: Python does nothing else during each of them."""
        assert self._memory is not None
        with contextlib.suppress(OSError, ValueError):  # before Linux 5.14
            for begin in range(0, size, _PIECE):
                self._memory.madvise(_MADV_POPULATE_WRITE, begin, min(_PIECE, size - begin))

    def _pin(self) -> None:
        if self._device.type != "cuda" or self._bytes is None:
            return
        code = _runtime().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)
        self._pinned = int(code) == 0
        if not self._pinned:
            _LOG.warning("Memory for checkpoints cannot be pinned (CUDA error %s): copies take longer.", code)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
