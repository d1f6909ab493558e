"""The demo's training script, which ``azureml-elastic demo`` runs: a small network learns real handwritten digits."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train
from azureml_elastic.environment.worker import WorkerEnvironment

HELD_OUT = 297
"""Number of the 1,797 images that measure the accuracy."""


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=60)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds added to each step")
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)

    run = train.start()
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = run.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    dataset = TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT])
    loader = run.loader(dataset, global_batch_size=options.global_batch_size)
    loss_of = nn.CrossEntropyLoss()

    for epoch in run.epochs(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            run.log({"loss": loss})
            run.backward(loss)
            optimizer.step()
            run.commit()
            time.sleep(options.step_delay)
        with torch.no_grad():
            predicted = network(images[-HELD_OUT:].to(run.device)).argmax(dim=1).cpu()
        accuracy = (predicted == labels[-HELD_OUT:]).float().mean().item()
        if run.is_main:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}, world size {run.world_size}", flush=True)
            result = json.dumps({"accuracy": accuracy, "epochs": epoch + 1})
            Path(WorkerEnvironment.read().run_dir or ".", "result.json").write_text(result, encoding="utf-8")
    run.finish()


if __name__ == "__main__":
    _main()
