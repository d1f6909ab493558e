"""Trains weights that count how often each sample has been trained, and writes down what each process has done.

Each process appends a line for each step that it has completed to a file of its own, ``<node>.<process>.steps``: the
time, the round and the step. Those that train to the end leave their weights, ``<node>.<process>.weights``. A sample's
gradient is one at its own weight alone, so that the weights in the end say what the state that survived has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from pace import Pace
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train

SAMPLES, BATCH = 240, 12

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--ballast", type=int, default=0, help="megabytes that a checkpoint has to carry beside the model")
Pace.add_arguments(parser)
arguments = parser.parse_args()
pace = Pace(arguments)
own = arguments.folder / f"{os.environ['AZUREML_ELASTIC_NODE_ID']}.{os.getpid()}"

torch.set_num_threads(1)
with train.start() as run, own.with_suffix(f"{own.suffix}.steps").open("ab", buffering=0) as file:
    model = nn.Embedding(SAMPLES, 1, _weight=torch.zeros(SAMPLES, 1))
    model.ballast = nn.Parameter(torch.zeros(arguments.ballast << 18), requires_grad=False)
    counts = model.weight
    model = run.wrap(model)
    optimizer = torch.optim.SGD([counts], lr=BATCH)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.arange(SAMPLES)), global_batch_size=BATCH, seed=7)
    for _ in run.epochs(arguments.epochs):
        for (samples,) in loader:
            trained_in, before = run.round, run.steps
            run.backward(-model(samples).mean())
            optimizer.step()
            optimizer.zero_grad()
            try:
                run.commit()
            finally:  # the worker's last step of a round ends it
                if run.steps > before:
                    file.write(f"{time.time()} {trained_in} {run.steps}\n".encode())
            pace.rest(run)
    own.with_suffix(f"{own.suffix}.weights").write_text(json.dumps(counts.flatten().tolist()))
