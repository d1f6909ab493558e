"""Train a small network on scikit-learn's images of handwritten digits, elastically.

Alone:    python samples/digits.py --epochs 5
Locally:  azureml-elastic local --nodes 1:3 samples/digits.py --epochs 5

The digits come with scikit-learn (``pip install 'azureml-elastic[demo]'``). Even if nodes come and go, each training
image is trained once an epoch, and the final accuracy is that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


def load(test_every: int = 5) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return the training set, and images and labels held out: every fifth one."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0  # (1797, 1, 8, 8)
    y = torch.tensor(digits.target, dtype=torch.int64)
    held_out = torch.arange(len(x)) % test_every == 0
    return TensorDataset(x[~held_out], y[~held_out]), x[held_out], y[held_out]


def build() -> nn.Module:
    """Return the network: two convolutions, and one hidden layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> None:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=64, help="samples of one step over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    training, test_x, test_y = load()

    run = train.start()
    model = run.wrap(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, arguments.epochs))
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = run.loader(training, global_batch_size=arguments.global_batch_size, seed=arguments.seed)
    if run.is_main:
        print(f"round {run.round}: {run.world_size} ranks, continuing after step {run.steps}", flush=True)

    loss_of = nn.CrossEntropyLoss()
    for epoch in run.epochs(arguments.epochs):
        for index, (x, y) in enumerate(loader):
            loss = loss_of(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(arguments.step_delay)
            run.log({"loss": loss, "learning_rate": optimizer.param_groups[0]["lr"]})
            run.commit()
            if run.is_main and index % 10 == 0:
                print(f"epoch {epoch} step {run.steps} loss {loss.item():.4f}", flush=True)
        scheduler.step()

    if run.is_main:
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_x.to(run.device)).argmax(1).cpu() == test_y).float().mean().item()
        print(f"accuracy {accuracy:.4f} after {run.steps} steps", flush=True)


if __name__ == "__main__":
    main()
