"""A script that starts its ranks itself, as one for a single machine does: ``launches_itself.py``."""

from __future__ import annotations

import os

import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank: int, world_size: int) -> None:
    """Open the process group."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "9"  # where nothing listens
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


if __name__ == "__main__":
    mp.spawn(train, args=(1,), nprocs=1)
