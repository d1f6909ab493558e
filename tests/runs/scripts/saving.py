"""A script without a session that saves before each step: ``saving.py reads|blind LOG``.

Its folder is in ``STATE_FOLDER``. With ``reads`` it continues from its save, and ends once it has done so beside a new
node. With ``blind`` it never reads, and ends a hundred saves after rank 0's ``LOG`` says what the new node waits for;
where it was stopped for that node instead, it fails.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
way, log, folder = sys.argv[1], Path(sys.argv[2]), Path(os.environ["STATE_FOLDER"])
state, alone = folder / "last.pt", folder / "alone.log"

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if way == "blind" and alone.exists() and world == 2:
    sys.exit(3)
first = step = torch.load(state) if way == "reads" and state.exists() else 0
print(f"begins at step {first}", flush=True)
dist.barrier()  # all have read
if rank == 0 and world == 1:
    alone.touch()
last: int | None = None
over = torch.zeros(1)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
while not over:
    time.sleep(0.02)
    step += 1
    if rank == 0:
        torch.save(step, folder / "new.pt")
        (folder / "new.pt").replace(state)
        if last is None and way == "reads" and world == 2 and first:
            last = step + 5
        if last is None and way == "blind" and world == 1 and "waiting, as the program" in log.read_text():
            last = step + 100
        over += step == last
    dist.all_reduce(over)
    optimizer.step()
print(f"ends at step {step}", flush=True)
