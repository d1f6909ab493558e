"""A small training run under a batch policy, with shards, a schedule and evaluation. Prints what it has learnt."""

from __future__ import annotations

import argparse
import hashlib

import torch
from pace import Pace
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import FixedGlobalBatch, FixedPerWorkerBatch, train

POLICIES = {
    "exact": FixedGlobalBatch(logical_workers=12, reduce="exact"),
    "logical-workers": FixedGlobalBatch(logical_workers=4),
    "per-worker": FixedPerWorkerBatch(scaling="linear"),
    "adascale": FixedPerWorkerBatch(scaling="adascale"),
    "planned": None,
}

parser = argparse.ArgumentParser()
parser.add_argument("policy", choices=POLICIES)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--shards", action="store_true")
Pace.add_arguments(parser)
arguments = parser.parse_args()
pace = Pace(arguments)

torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(236, 8, generator=generator)
targets = inputs.square().sum(1, keepdim=True)


def read(shard):
    """Return the samples of a shard: one more in each than in the one before."""
    begin = shard * (shard + 1) // 2
    return zip(inputs[begin : begin + shard + 1], targets[begin : begin + shard + 1], strict=True)


with train.start(batch=POLICIES[arguments.policy]) as run:
    model = run.wrap(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    schedule = run.schedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40 * arguments.epochs))
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    dataset = train.Shards(range(21), read) if arguments.shards else TensorDataset(inputs, targets)
    loader = run.loader(dataset, global_batch_size=12, seed=7)
    for _ in run.epochs(arguments.epochs):
        for x, y in loader:
            run.backward(nn.functional.mse_loss(model(x), y))
            if run.accumulating:
                continue
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.commit()
            pace.rest(run)
        measured = run.evaluate(
            lambda batch: {"loss": nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")},
            TensorDataset(inputs, targets),
            batch_size=50,
        )
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    if run.is_main:
        rate = optimizer.param_groups[0]["lr"]
        print("learnt", digest.hexdigest()[:16], measured["loss"].hex(), rate.hex(), run.steps, flush=True)
