"""What every training script of this folder trains, and the record of its steps.

Each step is a line in the file ``<node>.<pid>`` of the folder ``BENCH_STEPS``: the time (CLOCK_MONOTONIC, which all
processes of a machine share), the world size, the rank, the round, and the steps so far. A script runs until the
process ``BENCH_OBSERVER`` has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

GLOBAL_BATCH_SIZE = 60
STEP_SECONDS = float(os.environ.get("BENCH_STEP_SECONDS", "0.05"))
"""Waiting time of each step, as if for a GPU."""

STATE_TENSORS = int(os.environ.get("BENCH_STATE_MIB", "0")) // 8
"""Number of frozen weights of 8 MiB beside the network, which are sent and restored as all others are."""


def dataset() -> TensorDataset:
    """Return as many images as scikit-learn's digits, of their shape."""
    return TensorDataset(torch.rand(1437, 1, 8, 8), torch.randint(10, (1437,)))


def network() -> nn.Module:
    """Return the network of samples/digits.py."""
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    for number in range(STATE_TENSORS):
        layers.register_parameter(f"frozen{number}", nn.Parameter(torch.full((1024, 2048), 1.0), requires_grad=False))
    return layers


def prepare() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def recorder() -> Callable[[int, int, int, int], None]:
    """Return the function that records a completed step and waits for the next one."""
    node = os.environ.get("BENCH_NODE", "node")
    file = Path(os.environ["BENCH_STEPS"], f"{node}.{os.getpid()}").open("w", encoding="ascii", buffering=1)  # noqa: SIM115
    observer = Path("/proc", os.environ["BENCH_OBSERVER"])

    def record(world: int, rank: int, number: int, step: int) -> None:
        file.write(f"{time.monotonic():.6f} {world} {rank} {number} {step}\n")
        if not observer.exists():
            os._exit(0)
        time.sleep(STEP_SECONDS)

    return record
