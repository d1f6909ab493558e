"""A plain script that releases models of DDP after their process group, as one does that leaves its ``main()``."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# The thread of the group needs the GIL right after a backward pass: this one does not let go of it by itself.
sys.setswitchinterval(1000)
torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()


for _ in range(30):
    main()
