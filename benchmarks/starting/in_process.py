"""The training script under NVRx: its in-process wrapper around a function that trains with torch's DDP."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from network import GLOBAL_BATCH_SIZE, dataset, network, prepare, recorder
from nvidia_resiliency_ext import inprocess
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = dataset()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH_SIZE // world, sampler=sampler)
    loss_of = nn.CrossEntropyLoss()
    record = recorder()
    steps = itertools.count(1)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            record(world, rank, 1, next(steps))


def main() -> None:
    prepare()
    # Its store is not that of the process group: the wrapper's threads wait in it.
    inprocess.Wrapper(store_kwargs={"port": int(os.environ["BENCH_WRAPPER_PORT"])})(train)()


if __name__ == "__main__":
    main()
