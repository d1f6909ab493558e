"""A loop with accelerate that does nothing but train, and times its turns: those of trained steps, and of new ones."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--steps", type=int)
options = parser.parse_args()

trained = []  # numbers of the turns in which the optimizer has stepped
accelerator = Accelerator()
torch.manual_seed(0)
points = torch.randn(options.steps * 8, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), shuffle=True, batch_size=4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=options.steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
ends = []
register_optimizer_step_post_hook(lambda *_: trained.append(len(ends)))
total = 0.0
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    total += loss.item()
    ends.append(time.perf_counter())
first = trained[0]
found = {
    "repeated": first,
    # The first turns restore the state and train a real batch.
    "repeated_seconds": ends[first - 1] - ends[1] if first > 2 else 0.0,
    "trained": len(ends) - 1 - first,
    "trained_seconds": ends[-1] - ends[first],
}
(options.folder / f"turns.{os.getpid()}").write_text(json.dumps(found))
