"""Train with FSDP2: parameters, gradients and the optimizer's state are sharded over all workers.

Alone:    python samples/fsdp2.py --epochs 5
Locally:  azureml-elastic local --nodes 1:3 --nproc-per-node 2 samples/fsdp2.py --epochs 5

With a worker its part of the model is lost, so the run continues from the newest snapshot or checkpoint. Snapshots are
taken by default where the nodes have the memory; both are resharded for the workers of the new round.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from azureml_elastic import train


class Block(nn.Module):
    """A residual layer, the unit in which parameters are gathered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same shape, (batch, width)."""
        return torch.add(x, self.inner(x))


def main() -> None:
    """Train, and print the accuracy on the training set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target))

    run = train.start()
    blocks = [Block(arguments.width) for _ in range(arguments.blocks)]
    model = nn.Sequential(nn.Linear(64, arguments.width), *blocks, nn.Linear(arguments.width, 10)).to(run.device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)  # restores at any number of workers
    loader = run.loader(dataset, global_batch_size=64, seed=0)

    loss_of = nn.CrossEntropyLoss()
    for epoch in run.epochs(arguments.epochs):
        for x, y in loader:
            loss = loss_of(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(arguments.step_delay)
            run.commit()
            if run.is_main and run.steps % 10 == 0:
                text = f"epoch {epoch} step {run.steps}: loss {loss.item():.3f}, world size {run.world_size}"
                print(text, flush=True)

    model.eval()
    x, y = (tensor.to(run.device) for tensor in dataset.tensors)
    with torch.no_grad():  # a collective: each rank has a part of every layer
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    if run.is_main:
        print(f"accuracy {accuracy:.4f} after {run.steps} steps", flush=True)


if __name__ == "__main__":
    main()
