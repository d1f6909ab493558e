"""One rank falls asleep for ever at step 20, once: ``hanging.py RANK MARKER``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


torch.set_num_threads(1)
victim, marker = int(sys.argv[1]), Path(sys.argv[2])
with train.start() as run:
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.randn(40, 1)), global_batch_size=4)
    for _ in run.epochs(4):
        for (x,) in loader:
            if run.steps == 20 and run.rank == victim and not marker.exists():
                marker.touch()
                sleep_for_ever()
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
