"""A script without a session that needs some seconds before it trains: ``saving.py --output_dir FOLDER [--no_save]``.

It goes on until it has lost a node and got another one, and fails if it was stopped before it had trained and saved.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
folder, saves = Path(sys.argv[2]), "--no_save" not in sys.argv
begun, trained, checkpoint = folder / "begun", folder / "trained", folder / "checkpoint-1"
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
folder.mkdir(exist_ok=True)


def train(seconds: float) -> None:
    """Take steps for so long."""
    for _ in range(int(seconds * 10)):
        dist.all_reduce(torch.ones(4))
        time.sleep(0.1)


if world == 2:
    time.sleep(5.0)  # the data
dist.init_process_group("gloo")
if world == 2:
    train(1.0)
    if rank == 0:
        trained.touch()
    for _ in range(100):
        if rank == 0 and saves:
            checkpoint.mkdir(exist_ok=True)
            torch.save(torch.ones(4), checkpoint / "model.pt")
        train(5.0)
elif begun.exists():
    print(f"trained {trained.exists()}, saved {checkpoint.exists()}", flush=True)
    sys.exit(0 if trained.exists() and checkpoint.exists() == saves else 3)
else:
    dist.barrier()  # all have seen that it has not begun
    if rank == 0:
        begun.touch()
    train(600.0)
