"""Train on the prepared images, elastically, and write the model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from network import build
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


def main() -> None:
    """Train, and write model.pt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = np.load(arguments.data / "train.npz")
    training = TensorDataset(torch.from_numpy(images["x"]), torch.from_numpy(images["y"]))
    run = train.start()
    network = build()
    model = run.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(training, global_batch_size=64, seed=0)
    loss_of = nn.CrossEntropyLoss()
    for epoch in run.epochs(arguments.epochs):
        for x, y in loader:
            loss = loss_of(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(arguments.step_delay)
            run.log({"loss": loss})
            run.commit()
        if run.is_main:
            print(f"epoch {epoch}: step {run.steps}, {run.world_size} ranks", flush=True)
    if run.is_main:
        torch.save(network.state_dict(), arguments.model / "model.pt")


if __name__ == "__main__":
    main()
