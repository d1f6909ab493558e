"""Memory that a checkpoint is copied to before it is written; training waits for this copy only.

The memory is allocated once, while training goes on, and reused: the page faults of fresh memory cost several times as
much as the copy. It is shared and anonymous (``memfd_create``), so that nothing is left behind when the process dies.
For a GPU it is pinned, so that the device copies to it without the host.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from azureml_elastic.distributed.device import device_of

__all__ = ["StagingBuffer"]

_SPARE = 1.05
"""Factor of the allocated to the requested size: states grow a little, and fresh memory is slow."""

_PIECE = 1 << 23
_MADV_POPULATE_WRITE = 23  # not among Python's names


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
        """Allocate at least this size; the content may be lost.

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
            for begin in range(0, size, _PIECE):  # in pieces: each call blocks the interpreter
                self._memory.madvise(_MADV_POPULATE_WRITE, begin, min(_PIECE, size - begin))
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
        """Copy a tensor to an offset; from a GPU without waiting, see :meth:`synchronize`."""
        assert self._bytes is not None
        if tensor.numel() == 0:
            return
        source = tensor.detach()
        size = source.numel() * source.element_size()
        target = self._bytes[begin : begin + size]
        if begin % source.element_size() == 0:
            target = target.view(source.dtype).view(source.shape)
        else:  # such as an element of three bytes
            source = source.contiguous().view(torch.uint8).flatten()
        self._device.copy_out(target, source, pinned=self._pinned)

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        self._device.synchronize()

    def release(self) -> None:
        """Free the memory; views of it keep it alive."""
        if self._bytes is not None and self._pinned:
            self._device.unpin(self._bytes)
        self._bytes, self._memory, self._pinned = None, None, False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def tensor(self, begin: int, end: int) -> torch.Tensor:
        """Return a part of the buffer as a tensor of bytes."""
        assert self._bytes is not None
        return self._bytes[begin:end]

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter CUDA may be unusable already
            self.release()
