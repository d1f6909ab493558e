"""A plain data-parallel script, as it runs under torchrun; it does not use this library.

torchrun --nproc-per-node 2 samples/plain_ddp.py --checkpoint state.pt --epochs 5

It keeps its own checkpoint: rank 0 replaces one file after each epoch, and a restart continues from it. Under an
elastic job it is restarted whenever the number of nodes changes, and loses at most the current epoch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(path: Path, state: Mapping[str, object]) -> None:
    """Replace the checkpoint file atomically: a reader gets the old state or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def main() -> None:
    """Train, and print the accuracy on the training set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the file to resume from and to write")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one step on each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    rank = dist.get_rank()

    digits = load_digits()
    dataset = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16.0, torch.tensor(digits.target, dtype=torch.int64)
    )
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    first_epoch = 0
    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"]
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, continuing at epoch {first_epoch}", flush=True)

    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=arguments.batch_size, sampler=sampler)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(arguments.step_delay)
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            save(arguments.checkpoint, state)
            print(f"epoch {epoch} is in the checkpoint", flush=True)

    if rank == 0:
        model.eval()
        with torch.no_grad():
            x, y = dataset.tensors
            accuracy = (model.module(x).argmax(1) == y).float().mean().item()
        print(f"accuracy {accuracy:.4f} after {arguments.epochs} epochs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
