"""Trains with a loop that stops by its own counter, in the shape of the public scripts without ``Trainer``.

Its schedule counts steps on all processes, it sums the losses of an epoch, saves folders by its counter, and ends with
``end_training()``. It records what it has counted in the folder that it is given.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--limit", type=int, default=110)
parser.add_argument("--pause", type=float, default=0.0)
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(0)
points = torch.randn(960, 8)
loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), shuffle=True, batch_size=8)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = args.limit * accelerator.num_processes
lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
epochs = math.ceil(args.limit / len(loader))

completed_steps, means = 0, []
for _ in range(epochs):
    total_loss, batches = 0.0, 0
    for x, y in loader:
        rate = optimizer.param_groups[0]["lr"]
        loss = nn.functional.mse_loss(model(x), y)
        total_loss += accelerator.reduce(loss.detach(), reduction="mean").item()
        batches += 1
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        completed_steps += 1
        time.sleep(args.pause)
        if completed_steps % 10 == 0:
            accelerator.save_state(str(args.folder / f"step_{completed_steps}"))
        if completed_steps >= args.limit:
            break
    means.append(total_loss / batches)

if accelerator.is_main_process:
    counted = {"completed_steps": completed_steps, "rate": rate, "means": means, "length": len(loader)}
    (args.folder / "record.json").write_text(json.dumps(counted))
accelerator.end_training()
