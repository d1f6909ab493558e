"""Trains with a cycle of the learning rate that knows all steps before."""

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

accelerator = Accelerator(step_scheduler_with_optimizer=False)
torch.manual_seed(8)
model = toy.perceptron(2)
train_dataloader = DataLoader(toy.Points(classes=True), shuffle=True, batch_size=4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
lr_scheduler = accelerator.prepare(
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=2, steps_per_epoch=len(train_dataloader))
)
accuracy, steps, rates = torch.zeros(2), 0, []
for _ in range(2):
    accuracy.zero_()
    for x, y in train_dataloader:
        scores = model(x)
        accelerator.backward(nn.functional.cross_entropy(scores, y))
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        steps += 1
if accelerator.is_main_process:
    found = {"completed_steps": steps, "rate": lr_scheduler.get_last_lr()[0]}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
