"""Lowers the learning rate when the validation's loss stays, keeps the best epoch, and names epochs more than once."""

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
torch.manual_seed(9)
model = toy.perceptron()
train_dataloader = DataLoader(toy.Points(80), shuffle=True, batch_size=4)
val_dataloader = DataLoader(toy.Points(32, seed=1), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
model, optimizer, train_dataloader, val_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, val_dataloader, lr_scheduler
)
steps, best = 0, None
for epoch in range(5):
    train_dataloader.set_epoch(epoch // 3)
    model.train()
    for x, y in train_dataloader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        steps += 1
    model.eval()
    with torch.inference_mode():
        losses = [accelerator.gather_for_metrics((model(x) - y).square().flatten()) for x, y in val_dataloader]
    loss = torch.cat(losses).mean().item()
    lr_scheduler.step(loss)
    best = loss if best is None else min(best, loss)
if accelerator.is_main_process:
    found = {"completed_steps": steps, "rate": optimizer.param_groups[0]["lr"]}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
accelerator.end_training()
