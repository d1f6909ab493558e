"""A script that is profiled and ends in a given way after some step."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import Profile, train

parser = argparse.ArgumentParser()
parser.add_argument("--first", type=int, default=3)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--each-round", action="store_true")
parser.add_argument("--end-at", type=int, required=True)
parser.add_argument("--ending", default="finish")
parser.add_argument("--gather", type=int, default=1, help="train slowly before the first recording with fewer workers")
parser.add_argument("--strict", action="store_true", help="raise warnings as errors")
arguments = parser.parse_args()
if arguments.strict:
    warnings.simplefilter("error")


def pause() -> float:
    """Return the seconds after a step: a late node still finds the run, and a lost one is lost while it is recorded."""
    if run.world_size < arguments.gather and run.steps < arguments.first - 1:
        return 3.0
    return 0.5 if run.world_size > 1 and run.steps >= 20 else 0.02


torch.set_num_threads(1)
profile = Profile(
    first_step=arguments.first, steps=arguments.steps, warmup_steps=1, each_round=arguments.each_round, ranks="all"
)
run = train.start(profile=profile)
model = run.wrap(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader(TensorDataset(torch.ones(8 * arguments.end_at, 4)), global_batch_size=8)
for _ in run.epochs(1):
    for (x,) in loader:
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause())
        if run.steps + 1 == arguments.end_at and arguments.ending == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        run.commit()
        if run.steps == arguments.end_at and arguments.ending == "raise":
            raise ValueError("as requested")
        if run.steps == arguments.end_at and arguments.ending == "exit":
            sys.exit(5)
