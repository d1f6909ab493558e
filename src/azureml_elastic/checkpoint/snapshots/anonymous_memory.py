"""Memory without a name, written once by this process and then read by others through its descriptor.

It is written, not mapped: the kernel need not clear pages that are overwritten as a whole, nor map each of them for
this process, which takes longer than the copy.
"""

from __future__ import annotations

import contextlib
import os

import torch

from azureml_elastic.checkpoint.state.memory import memory_of

__all__ = ["AnonymousMemory"]

_BLOCK_BYTES = 8 << 20


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
