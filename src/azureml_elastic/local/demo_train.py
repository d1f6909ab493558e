"""The demo's training script, which ``azureml-elastic demo`` runs: a small network learns real handwritten digits."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train
from azureml_elastic.environment.worker import WorkerEnvironment

HELD_OUT = 297
"""Number of the 1,797 images that measure the accuracy."""


class WorldSizes:
    """The world sizes of the run so far, which all ranks know alike, as they are saved and restored.

    Args:
        awaited: whether a loss and a later arrival are waited for.
    """

    def __init__(self, *, awaited: bool) -> None:
        self._awaited = awaited
        self._sizes: list[int] = []

    def add(self, size: int) -> None:
        """Note the size of a step."""
        if self._sizes[-1:] != [size]:
            self._sizes.append(size)

    @property
    def complete(self) -> bool:
        """Whether there has been all that is waited for."""
        pairs = list(itertools.pairwise(self._sizes))
        losses = [at for at, (before, after) in enumerate(pairs) if after < before]
        return not self._awaited or any(after > before for before, after in pairs[min(losses, default=len(pairs)) :])

    def state_dict(self) -> dict[str, list[int]]:
        """Return the sizes."""
        return {"sizes": list(self._sizes)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Restore the sizes."""
        self._sizes = list(state["sizes"])


def epochs_of(run: train.Session, least: int, sizes: WorldSizes) -> Iterator[int]:
    """Yield at least so many epochs, and further ones until all has happened that is waited for."""
    count = max(least, run.epoch + 1)
    yield from run.epochs(count)
    while not sizes.complete:
        count += 1
        yield from run.epochs(count)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=60)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--regain", action="store_true", help="train on until a lost node has been replaced")
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)

    run = train.start()
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = run.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = WorldSizes(awaited=options.regain)
    run.track(model=model, optimizer=optimizer, sizes=sizes)
    dataset = TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT])
    loader = run.loader(dataset, global_batch_size=options.global_batch_size)
    loss_of = nn.CrossEntropyLoss()

    for epoch in epochs_of(run, options.epochs, sizes):
        for x, y in loader:
            sizes.add(run.world_size)
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
