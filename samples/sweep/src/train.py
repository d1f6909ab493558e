"""Train on scikit-learn's handwritten digits, elastically, and log the accuracy on every fifth one, held out."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


def main() -> None:
    """Train, and log the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits(return_X_y=True)
    x, y = torch.tensor(digits[0], dtype=torch.float32) / 16.0, torch.tensor(digits[1])
    held_out = torch.arange(len(x)) % 5 == 0
    run = train.start()
    model = run.wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(x[~held_out], y[~held_out]), global_batch_size=64, seed=0)
    for _ in run.epochs(arguments.epochs):
        for images, labels in loader:
            run.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            if run.steps % 10 == 0:
                with torch.no_grad():
                    right = model(x[held_out].to(run.device)).argmax(1).cpu() == y[held_out]
                run.log({"accuracy": right.float().mean()})
            run.commit()


if __name__ == "__main__":
    main()
