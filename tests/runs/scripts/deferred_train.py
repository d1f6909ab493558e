"""Training on a device that runs behind the host: collectives and updates are queued, as on a GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from pace import Pace
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train
from azureml_elastic.distributed import device

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.deferred import DeferredDevice, DeferredSGD, reduce_later

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
Pace.add_arguments(parser)
arguments = parser.parse_args()
pace = Pace(arguments)

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(240, 4, dtype=torch.float64)  # before track(), which restores the generator
gpu = DeferredDevice(operation_s=0.005, may_stay=True)
device.register("cpu", gpu)
with train.start() as run:
    model = run.wrap(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        gradient_as_bucket_view=True,
        bucket_cap_mb=0.0001,
    )
    model.register_comm_hook(gpu, reduce_later)
    optimizer = DeferredSGD(model.parameters(), gpu, lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch_size=12, seed=7)
    for _ in run.epochs(arguments.epochs):
        for x, y in loader:
            gpu.synchronize()  # the forward pass is the device's work, too: it comes after the update
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            pace.rest(run)
    gpu.synchronize()
    if run.is_main:
        print("weights", " ".join(f"{weight:.9f}" for each in model.parameters() for weight in each.flatten().tolist()))
