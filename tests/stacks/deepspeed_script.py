"""Trains a small classifier with a DeepSpeed engine, as DeepSpeed's documentation shows it.

It records the samples and learning rates of its steps, and the final weights, in the folder that it is given.
"""

import argparse
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--pause", type=float, default=0.03)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--own-loader", action="store_true", help="a DataLoader with a DistributedSampler")
parser.add_argument("--resume", type=Path, help="folder of engine.save_checkpoint()")
parser.add_argument("--save-every", type=int, default=0, help="steps")
parser.add_argument("--skip", action="store_true", help="pass over the batches of the epoch that are trained")
options = parser.parse_args()


class Points(Dataset):
    """Points whose class is whether the sum of their coordinates is positive."""

    def __init__(self, count):
        self.points = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        self.classes = (self.points.sum(1) > 0).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.classes[index], index


def record(**line):
    """Append a line to the file of this process."""
    with (options.folder / f"steps.{os.getpid()}").open("a") as file:
        file.write(json.dumps(line) + "\n")


torch.manual_seed(0)
torch.set_num_threads(1)
deepspeed.init_distributed()
dataset = Points(options.samples)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(options.dropout), nn.ReLU(), nn.Linear(32, 2))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": options.accumulate,
    "zero_optimization": {"stage": options.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01, "total_num_steps": 200, "warmup_type": "linear"},
    },
}
if options.own_loader:
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
else:
    engine, _, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=dataset, config=config
    )

steps = first_epoch = 0
if options.resume:
    path, client_state = engine.load_checkpoint(str(options.resume))
    if path is not None:
        steps, first_epoch = client_state["steps"], client_state["epoch"]

loss = None
for epoch in range(first_epoch, options.epochs):
    for step, (points, classes, index) in enumerate(loader, start=epoch * len(loader)):
        if options.skip and step < steps * options.accumulate:
            continue
        record(epoch=epoch, samples=index.tolist())
        time.sleep(options.pause)
        loss = nn.functional.cross_entropy(engine(points), classes)
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if not boundary:
            continue
        steps += 1
        if torch.distributed.get_rank() == 0:
            record(step=engine.global_steps, rate=scheduler.get_last_lr()[0])
        if options.save_every and steps % options.save_every == 0:
            engine.save_checkpoint(str(options.resume), client_state={"steps": steps, "epoch": epoch})

with deepspeed.zero.GatheredParameters(list(model.parameters())):
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
if torch.distributed.get_rank() == 0:
    with torch.no_grad():
        own = nn.Sequential(nn.Linear(8, 32), nn.Identity(), nn.ReLU(), nn.Linear(32, 2))
        own.load_state_dict(weights)
        loss = nn.functional.cross_entropy(own(dataset.points), dataset.classes).item()
    torch.save(weights, options.folder / "model.pt")
    lines = [json.loads(line) for file in options.folder.glob("steps.*") for line in file.read_text().splitlines()]
    rates = sorted([line["step"], line["rate"]] for line in lines if "rate" in line)
    document = {"steps": steps, "global_steps": engine.global_steps, "loss": loss, "rates": rates}
    (options.folder / "record.json").write_text(json.dumps(document))
