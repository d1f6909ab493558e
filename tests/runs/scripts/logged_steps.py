"""Training that logs each step, and something at the end of each epoch."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


def main():
    """Train for some epochs of ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--wait-for", nargs=2, help="folder and pattern of a file that step 10 waits for")
    parser.add_argument("--fail-after", type=int, help="step after which the first round fails")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = train.start()
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.ones(120, 1)), global_batch_size=12)
    for epoch in run.epochs(arguments.epochs):
        for (x,) in loader:
            loss = model(x).square().mean()
            run.log({"loss": loss, "step": run.steps + 1})
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(arguments.step_seconds)
            while (
                run.steps == 10
                and arguments.wait_for
                and not any(Path(arguments.wait_for[0]).glob(arguments.wait_for[1]))
            ):
                time.sleep(0.05)
            run.commit()
            if run.steps == arguments.fail_after and run.round == 1:
                raise ValueError("as requested")
        run.log({"epoch": epoch})


if __name__ == "__main__":
    main()
