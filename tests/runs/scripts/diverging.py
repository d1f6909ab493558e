"""Trains 20 steps with one loss that is NaN: ``diverging.py POLICY NOTES STEP [TIMES]``.

``NOTES`` is a folder in which files tell how often the step was met, so that it is NaN ``TIMES`` times, or once.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import CheckpointPolicy, train

policy, notes, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
times = int(sys.argv[4]) if len(sys.argv) > 4 else 1
notes.mkdir(exist_ok=True)
torch.set_num_threads(1)
with train.start(CheckpointPolicy(on_nonfinite=policy)) as run:
    torch.manual_seed(0)
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for (x,) in run.loader(TensorDataset(torch.randn(80, 1)), global_batch_size=4):
            loss = model(x).mean()
            if run.steps + 1 == step and run.is_main:
                met = len(list(notes.iterdir()))
                if met < times:
                    (notes / str(met)).touch()
                    loss = loss * float("nan")
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
    if run.is_main:
        weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
        (notes.parent / "weights.json").write_text(json.dumps([math.isfinite(value) for value in weights]))
