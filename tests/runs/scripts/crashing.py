"""Crashes on rank 0 in step 6: ``once FILE`` on the first attempt only, ``always`` on every one."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


def fail() -> None:
    """End as a program with exit codes of its own does: a traceback, then the code."""
    try:
        int("this never works")
    except ValueError:
        traceback.print_exc()
        sys.exit(7)


torch.set_num_threads(1)
mode = sys.argv[1]
with train.start() as run:
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for (x,) in run.loader(TensorDataset(torch.randn(40, 1)), global_batch_size=4):
            if run.steps == 5 and run.is_main and (mode == "always" or not Path(sys.argv[2]).exists()):
                if mode == "once":
                    Path(sys.argv[2]).touch()
                fail()
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
