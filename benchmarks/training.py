"""The training script of every system: data-parallel training that records each step.

Under torchrun it uses only torch, under this library a session (``BENCH_SESSION``).
Each step is a line in the file ``<node>.<pid>`` of the folder ``BENCH_STEPS``: the time, the world size, the rank, the
generation of the process group, and the steps of the run so far. The script runs until it is killed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEP_SECONDS = float(os.environ.get("BENCH_STEP_SECONDS", "0.05"))
"""Waiting time of each step, as if for a GPU, which leaves the cores to restarting processes."""

GLOBAL_BATCH_SIZE = 32


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(4096, 32))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def recorder(file: TextIO) -> Callable[[int, int, int, int], None]:
    def record(world: int, rank: int, generation: int, step: int) -> None:
        file.write(f"{time.time():.6f} {world} {rank} {generation} {step}\n")

    return record


def train_with_torch(record: Callable[[int, int, int, int], None]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = dataset()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH_SIZE // world, sampler=sampler)
    steps = itertools.count(1)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for (x,) in loader:
            model(x).square().mean().backward()  # averages over all ranks: all ranks have taken a recorded step
            optimizer.step()
            optimizer.zero_grad()
            record(world, rank, 1, next(steps))
            time.sleep(STEP_SECONDS)


def train_with_session(record: Callable[[int, int, int, int], None]) -> None:
    from azureml_elastic import train

    run = train.start()
    model = run.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(dataset(), global_batch_size=GLOBAL_BATCH_SIZE)
    for _ in run.epochs(1_000_000):
        for (x,) in loader:
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            before = run.steps
            run.commit()
            if run.steps > before:
                record(run.world_size, run.rank, run.round, run.steps)
            time.sleep(STEP_SECONDS)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = Path(os.environ["BENCH_STEPS"], f"{os.environ['BENCH_NODE']}.{os.getpid()}")
    with path.open("w", encoding="ascii", buffering=1) as file:
        (train_with_session if "BENCH_SESSION" in os.environ else train_with_torch)(recorder(file))


if __name__ == "__main__":
    main()
