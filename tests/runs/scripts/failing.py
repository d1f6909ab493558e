"""Trains 20 steps and fails after the given ones: ``failing.py WAY NOTES [STEP ...]``.

It fails in the middle of the next step: what is completed is not lost.

``NOTES`` is a folder in which failures leave a file, so that ``once`` and ``killed`` fail once after each step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train

way, notes, steps = sys.argv[1], Path(sys.argv[2]), [int(argument) for argument in sys.argv[3:]]
notes.mkdir(exist_ok=True)


def fail(step: int) -> None:
    """Fail in the way that was asked for."""
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "memory":
        torch.empty(1 << 60)
    if way == "code":
        sys.exit(9)
    if way == "printed":  # the traceback of an error that the program has caught, then a code of its own
        try:
            int("this never works")
        except ValueError:
            traceback.print_exc()
            sys.exit(9)
    raise ValueError(f"the loss is nan at step {step} of rank {os.environ['RANK']}, {time.monotonic_ns():#x}")


torch.set_num_threads(1)
with train.start() as run:
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for (x,) in run.loader(TensorDataset(torch.randn(80, 1)), global_batch_size=4):
            # Another rank in each round, so that nobody can mistake a node for the cause.
            if run.steps in steps and (way == "all" or run.rank == run.round % run.world_size):
                note = notes / str(run.steps)
                if way not in ("once", "killed") or not note.exists():
                    note.touch()
                    fail(run.steps)
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            time.sleep(0.05)
