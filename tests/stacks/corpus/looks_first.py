"""Looks at a batch and at all samples before it trains them in their own order."""

import argparse
import json
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(11)
model = toy.perceptron()
train_dataloader = DataLoader(toy.Points(150), batch_size=4)
test_dataloader = DataLoader(toy.Points(20, seed=1), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer, train_dataloader, test_dataloader = accelerator.prepare(
    model, optimizer, train_dataloader, test_dataloader
)
length = len(train_dataloader)
shape = list(next(iter(train_dataloader))[0].shape)
held = iter(train_dataloader)
first = next(held)
count, total = torch.zeros(()), torch.zeros(8)
for x, _ in train_dataloader:
    count, total = count + len(x), total + x.sum(0)
count, total = accelerator.reduce((count, total), reduction="sum")
lr_scheduler = accelerator.prepare(
    torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * length * accelerator.num_processes)
)
steps, tested = 0, []
for _ in range(2):
    model.train()
    batches = iter(train_dataloader)
    for _ in range(len(train_dataloader)):
        x, y = next(batches)
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        steps += 1
    model.eval()
    seen = 0
    for loader in (test_dataloader, train_dataloader):
        for x, _ in loader:
            with torch.no_grad():
                seen += len(accelerator.gather_for_metrics(model(x)))
    tested.append(seen)
if accelerator.is_main_process:
    found = {"completed_steps": steps, "length": length, "shape": shape, "count": float(count),
             "mean": (total / count).tolist(), "tested": tested}  # fmt: skip
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
