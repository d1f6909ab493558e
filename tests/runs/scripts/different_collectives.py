"""At step 8 rank 0 waits in a barrier, and the others in an all_reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


def save() -> None:
    dist.barrier()


def average() -> None:
    dist.all_reduce(torch.ones(1))


torch.set_num_threads(1)
with train.start() as run:
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.randn(40, 1)), global_batch_size=4)
    for _ in run.epochs(2):
        for (x,) in loader:
            if run.steps == 8:
                save() if run.rank == 0 else average()
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
