"""Trains with a cycle of the learning rate that knows all steps before; gathers between optimizer and scheduler."""

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
parser.add_argument("--die_before_gathering", type=int, nargs="*", default=[], help="steps in which rank 0 dies once")
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
steps, seen, epoch_losses = 0, 0.0, []
for _ in range(2):
    losses = []
    for x, y in train_dataloader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        if steps + 1 in args.die_before_gathering:
            toy.die_once(accelerator, args.output_dir / f"died_{steps}")
        losses.append(accelerator.gather(loss.detach()).mean().item())
        seen += accelerator.reduce(torch.tensor(len(y), device=accelerator.device)).item()
        lr_scheduler.step()
        optimizer.zero_grad()
        steps += 1
    epoch_losses.append(sum(losses) / len(losses))
if accelerator.is_main_process:
    rate = lr_scheduler.get_last_lr()[0]
    found = {"completed_steps": steps, "rate": rate, "samples": seen, "losses": epoch_losses}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
