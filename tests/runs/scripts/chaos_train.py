"""A small training run for the chaos tests: 80 steps of a linear model, every one of them audited."""

from __future__ import annotations

import argparse

import torch
from pace import Pace
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from azureml_elastic import train

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--ballast", type=int, default=0, help="megabytes that a checkpoint has to carry beside the model")
parser.add_argument("--sharded", action="store_true", help="by FSDP2, so that no worker has the whole state")
parser.add_argument("--replicas", action="store_true", help="by FSDP2 on the mesh of the round")
Pace.add_arguments(parser)
arguments = parser.parse_args()
pace = Pace(arguments)

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(236, 4)  # before run.track(), which has the generators differ between ranks
with train.start() as run:
    model = nn.Linear(4, 1)
    model.ballast = nn.Parameter(torch.zeros(arguments.ballast << 18), requires_grad=False)
    if arguments.sharded or arguments.replicas:
        model = fully_shard(model, mesh=run.mesh() if arguments.replicas else None)
    else:
        model = run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch_size=12, seed=7)
    for _ in run.epochs(arguments.epochs):
        for x, y in loader:
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            pace.rest(run)
    whole = [
        getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters() if each.requires_grad
    ]
    weights = torch.cat([each.detach().flatten() for each in whole])
    if run.is_main:
        print("weights", " ".join(f"{weight:.6f}" for weight in weights), flush=True)
