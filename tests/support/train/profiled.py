"""A script that is profiled and ends in a given way after some step."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

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
arguments = parser.parse_args()

torch.set_num_threads(1)
profile = Profile(first=arguments.first, steps=arguments.steps, warmup=1, each_round=arguments.each_round, ranks="all")
run = train.start(recording=train.Recording(profile=profile))
model = run.wrap(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader(TensorDataset(torch.ones(8 * arguments.end_at, 4)), global_batch_size=8)
for _ in run.epochs(1):
    for (x,) in loader:
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        # A node that is to be lost is lost before the end of the recording.
        time.sleep(0.5 if run.world_size > 1 and run.steps >= 20 else 0.02)
        if run.steps + 1 == arguments.end_at and arguments.ending == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        run.commit()
        if run.steps == arguments.end_at and arguments.ending == "raise":
            raise ValueError("as requested")
        if run.steps == arguments.end_at and arguments.ending == "exit":
            sys.exit(5)
