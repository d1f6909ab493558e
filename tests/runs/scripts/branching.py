"""A script that only names the library: ``branching.py [optimizer]``. Two workers go on until one is lost."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

if "session" in sys.argv:
    from azureml_elastic import train

    train.start()
else:
    dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight])
while dist.get_world_size() == 2:
    time.sleep(0.02)
    dist.all_reduce(torch.zeros(1))
    if "optimizer" in sys.argv:
        optimizer.step()
