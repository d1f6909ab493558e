"""Trains a small network to classify the points of a spiral by their arms; the points are generated here.

Alone:          python src/train.py
On local nodes: azureml-elastic local --nodes 1:2 src/train.py
On Azure ML:    see job.yml
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train

ARMS = 3


def spiral(count: int, seed: int) -> TensorDataset:
    """Return points of a spiral with the numbers of their arms.

    Args:
        count: number of points.
        seed: number from which the points are generated; equal seeds give equal points.
    """
    generator = torch.Generator().manual_seed(seed)
    arm = torch.arange(count) % ARMS
    radius = torch.rand(count, generator=generator)
    angle = 2 * math.pi * (arm / ARMS + radius) + 0.2 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def main() -> None:
    """Train, measure and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the model")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in each step")
    options = parser.parse_args()

    torch.manual_seed(0)
    run = train.start()
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, ARMS))
    model = run.wrap(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    run.track(model=model, optimizer=optimizer)  # state that survives the loss of a node
    loader = run.loader(spiral(3000, seed=1), global_batch_size=100)
    loss_of = nn.CrossEntropyLoss()

    for epoch in run.epochs(options.epochs):
        for points, arms in loader:
            loss = loss_of(model(points), arms)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(options.step_delay)
            run.commit()  # nodes may join or leave here
            if run.is_main and run.steps % 10 == 0:
                text = f"epoch {epoch} step {run.steps}: loss {loss.item():.3f}, world size {run.world_size}"
                print(text, flush=True)

    if run.is_main:
        points, arms = spiral(900, seed=2).tensors
        with torch.no_grad():
            guessed = network(points.to(run.device)).argmax(dim=1).cpu()
        print(f"accuracy {(guessed == arms).float().mean().item():.1%}", flush=True)
        options.output.mkdir(parents=True, exist_ok=True)
        torch.save(network.state_dict(), options.output / "model.pt")
    run.finish()


if __name__ == "__main__":
    main()
