"""The memory of a tensor as bytes."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["memory_of"]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, for writing; the tensor must outlive it."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
