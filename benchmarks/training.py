"""The script that every system runs: plain data-parallel training, which knows only torch.

It notes each step in a file ``<node>.<pid>`` of the folder ``BENCH_STEPS``: the time, the world size, the rank and the
step's number. It never ends by itself; whoever started the nodes ends them.
"""

from __future__ import annotations

import itertools
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEP_SECONDS = 0.05
"""How long a step takes at least: the machine's cores are needed by those that restart."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path = Path(os.environ["BENCH_STEPS"], f"{os.environ['BENCH_NODE']}.{os.getpid()}")
    with path.open("w", encoding="ascii", buffering=1) as notes:
        for step in itertools.count():
            loss = model(torch.randn(16, 32)).square().mean()
            loss.backward()  # averages the gradients over all ranks: a step that is noted was taken by all
            optimizer.step()
            optimizer.zero_grad()
            notes.write(f"{time.time():.6f} {world} {rank} {step}\n")
            time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()
