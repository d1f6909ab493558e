"""The training script under torchft: one replica group of one process, with torchft's DDP and manager."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

import torch
from network import GLOBAL_BATCH_SIZE, dataset, network, prepare, recorder
from torch import nn
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    prepare()
    record = recorder()
    number, minimum, most = (int(os.environ[f"BENCH_{name}"]) for name in ("REPLICA", "MINIMUM", "MAXIMUM"))
    module = network()
    plain = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def state() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": plain.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        module.load_state_dict(saved["model"])
        plain.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=minimum,
        replica_id=f"replica-{number}",
        hostname="127.0.0.1",
        init_sync=False,  # the weights are equal, as the seed is
    )
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, plain)
    samples = dataset()
    sampler = DistributedSampler(
        samples, replica_rank=number, num_replica_groups=most, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH_SIZE // most, sampler=sampler)
    loss_of = nn.CrossEntropyLoss()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                record(manager.num_participants(), number, 1, manager.current_step())


if __name__ == "__main__":
    main()
