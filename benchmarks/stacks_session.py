"""The model and the data of the stacks' scripts, trained with a session."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--pause", type=float, default=0.03)
options = parser.parse_args()

torch.manual_seed(0)
points = torch.randn(1000, 8)
run = train.start()
net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2))
model = run.wrap(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.track(model=model, optimizer=optimizer)
loader = run.loader(TensorDataset(points, (points.sum(1) > 0).long()), global_batch_size=24)
for _ in run.epochs(3):
    for x, y in loader:
        time.sleep(options.pause)
        optimizer.zero_grad()
        run.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        run.commit()
