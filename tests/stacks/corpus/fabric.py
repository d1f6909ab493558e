"""A loop of Lightning's Fabric that saves its state after each epoch, and continues from it."""

import argparse
import json
from pathlib import Path

import lightning
import torch
import toy
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()

fabric = lightning.Fabric(strategy="ddp", devices=1, num_nodes=2)
fabric.launch()
fabric.seed_everything(41)
model = toy.perceptron()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(toy.Points(80), shuffle=True, batch_size=4))
path = args.output_dir / "state.ckpt"
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
if path.exists():
    fabric.load(path, state)
while state["epoch"] < 6:
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    scheduler.step()
    state["epoch"] += 1
    fabric.save(path, state)
if fabric.is_global_zero:
    found = {"epoch": state["epoch"], "rate": scheduler.get_last_lr()[0]}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
