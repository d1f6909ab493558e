"""Makes its loader anew for each epoch, and leaves an epoch early by its own count."""

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
parser.add_argument("--in_order", action="store_true")
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(12)
dataset = toy.Points()
model = toy.perceptron()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
model, optimizer = accelerator.prepare(model, optimizer)
lr_scheduler = accelerator.prepare(
    torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50 * accelerator.num_processes)
)
steps, sizes = 0, []
for _ in range(3):
    loader = accelerator.prepare(DataLoader(dataset, shuffle=not args.in_order, batch_size=4))
    batches = 0
    for index, (x, y) in enumerate(loader):
        if index == 16:
            break
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        steps, batches = steps + 1, batches + 1
    sizes.append(batches)
if accelerator.is_main_process:
    (args.output_dir / "all_results.json").write_text(json.dumps({"completed_steps": steps, "sizes": sizes}))
accelerator.end_training()
