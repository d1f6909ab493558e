"""Trains some steps in a loop with ``Accelerator``, and ends within it in one of several ways.

Before, it opens a process group of its own and closes it again, as libraries of metrics do.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--end")
args = parser.parse_args()

accelerator = Accelerator()
points = torch.randn(32, 4)
loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), shuffle=True, batch_size=4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for steps, (x, y) in enumerate(loader, start=1):
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    if steps == 2:
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    if steps < 5:
        continue
    (args.folder / "record.json").write_text(json.dumps(accelerator.unwrap_model(model).weight.tolist()))
    if args.end == "end_training":
        accelerator.end_training()
    elif args.end == "destroy_process_group":
        dist.destroy_process_group()
    elif args.end == "del":
        del accelerator, model, optimizer, loader
    elif args.end == "exit":
        sys.exit(0)
    break
