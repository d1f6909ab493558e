"""Files that a training stack writes: on their device, and complete on all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

__all__ = ["all_arrive", "flush"]


def all_arrive() -> None:
    """Wait until all ranks have called this. A collective."""
    if dist.is_initialized():
        dist.barrier()


def flush(path: Path) -> None:
    """Have the kernel write a file or folder to its device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
