"""Train with DeepSpeed's ZeRO, elastically: the nodes may change during the run, and the stage at a restart.

Locally:  DS_ACCELERATOR=cpu azureml-elastic local --nodes 1:3 samples/deepspeed_zero.py --stage 3

Needs ``pip install deepspeed``. The data are random vectors; a small network learns where the largest element is.
"""

from __future__ import annotations

import argparse
import time

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import CheckpointPolicy, train

GLOBAL_BATCH = 60

CONFIG = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    "steps_per_print": 1_000_000,
}


def main() -> None:
    """Train, and print the share of correct predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO: 1, 2 or 3")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.rand(1200, 8)
    dataset = TensorDataset(x, x.argmax(1))

    # With a node its part of the state is lost: the run continues from snapshots in memory, each on two nodes.
    run = train.start(CheckpointPolicy(every=300, snapshot_every_steps=5))
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    config = {**CONFIG, "zero_optimization": {"stage": arguments.stage}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=run.deepspeed_config(config, global_batch_size=GLOBAL_BATCH),
    )
    run.track(engine=engine)
    loader = run.loader(dataset, global_batch_size=GLOBAL_BATCH)
    if run.is_main:
        print(f"round {run.round}: {run.world_size} ranks, continuing after step {run.steps}", flush=True)

    for epoch in run.epochs(arguments.epochs):
        for x, y in loader:
            scores = engine(x)
            run.backward(nn.functional.cross_entropy(scores, y))
            engine.step()
            right = (scores.argmax(1) == y).float().mean().item()
            time.sleep(arguments.step_delay)
            run.commit()
            if run.is_main and run.steps % 10 == 0:
                print(f"epoch {epoch} step {run.steps}: {right:.2f} right", flush=True)


if __name__ == "__main__":
    main()
