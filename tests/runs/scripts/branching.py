"""A script that only names the library: ``branching.py [trains]``. Two workers go on until one is lost.

With ``trains`` it has an optimizer of its own, which torch knows nothing of.
"""

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
while dist.get_world_size() == 2:
    time.sleep(0.02)
    dist.all_reduce(torch.zeros(1))
    if "trains" in sys.argv:
        weight.square().sum().backward()
        weight.data -= 0.1 * weight.grad
