"""The training script under torchrun: torch alone."""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
from network import GLOBAL_BATCH_SIZE, dataset, network, prepare, recorder
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    prepare()
    record = recorder()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = dataset()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH_SIZE // world, sampler=sampler)
    loss_of = nn.CrossEntropyLoss()
    steps = itertools.count(1)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            record(world, rank, 1, next(steps))


if __name__ == "__main__":
    main()
