"""Trains an epoch of data that the session cannot count, in one of several ways; an evaluation comes first."""

import argparse
import contextlib
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--kind", choices=["iterable", "dispatch", "second", "local", "twice", "again", "ranks", "plain"])
args = parser.parse_args()


class Stream(IterableDataset):
    """Points without an index."""

    def __iter__(self):
        return zip(points, targets, strict=True)


points = torch.randn(32, 4)
targets = points.sum(1, keepdim=True)
data = TensorDataset(points, targets)
if args.kind == "iterable":
    loader = DataLoader(Stream(), batch_size=4)
else:
    trained = TensorDataset(points, -targets) if args.kind == "second" else data
    loader = DataLoader(trained, shuffle=True, batch_size=3 if args.kind == "ranks" else 4)
division = DataLoaderConfiguration(dispatch_batches=True if args.kind == "dispatch" else None)
accelerator = Accelerator(dataloader_config=division)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if args.kind == "again":
    before = nn.Linear(4, 1)
    before, first, batches = accelerator.prepare(
        before, torch.optim.SGD(before.parameters(), lr=0.01), DataLoader(data, shuffle=True, batch_size=8)
    )
    for x, y in batches:
        accelerator.backward(nn.functional.mse_loss(before(x), y))
        first.step()
        first.zero_grad()
    accelerator.free_memory()
if args.kind == "second":
    accelerator.prepare(DataLoader(data, shuffle=True, batch_size=4))
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, DataLoader(data, batch_size=4))
with torch.no_grad():
    seen = sum(len(x) for x, _ in evaluation)
steps, local = 0, contextlib.nullcontext()
if args.kind == "local":
    local = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)
pairs = ((x, y) for (x, y), _ in zip(loader, loader, strict=True)) if args.kind == "twice" else loader
with local:
    for x, y in pairs:
        if args.kind == "ranks":
            total = len(x) * accelerator.num_processes
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward() if args.kind == "plain" else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if args.kind == "local":
            local.step()
        steps += 1
if accelerator.is_main_process:
    (args.folder / "record.json").write_text(json.dumps({"steps": steps, "seen": seen}))
accelerator.end_training()
