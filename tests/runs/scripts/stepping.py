"""A plain data-parallel script for torchrun: ``stepping.py STEPS PROGRESS [GO]``.

It counts steps in the file ``PROGRESS`` of rank 0's, so that restarts continue. With ``GO`` it goes on, also behind its
last step, until there is a file of that name.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
steps, progress = int(sys.argv[1]), Path(sys.argv[2])
go = Path(sys.argv[3]) if len(sys.argv) > 3 else None
if steps < 0:
    sys.exit("this script fails as requested")
dist.init_process_group("gloo")
print(f"world {dist.get_world_size()}", flush=True)  # in one write: the log may hold others' lines between two
step = torch.tensor([int(progress.read_text()) if progress.exists() else 0])
dist.broadcast(step, 0)


def over() -> bool:
    """Return whether rank 0 sees an end."""
    answer = torch.tensor([int(step >= steps and (go is None or go.exists()))])
    dist.broadcast(answer, 0)
    return bool(answer)


while not over():
    dist.all_reduce(torch.ones(4))
    step += 1
    if dist.get_rank() == 0:
        temporary = progress.with_suffix(".tmp")
        temporary.write_text(str(int(step)))
        temporary.replace(progress)
    time.sleep(0.1)
dist.destroy_process_group()
