"""A script without a session whose rank 0 saves when it gets SIGTERM: ``terminated.py FOLDER SECONDS``.

That takes so many seconds, and the other ranks end at once. The script ends when it has continued from the save.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

terminated: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
torch.set_num_threads(1)
state = Path(sys.argv[1]) / "step.txt"
dist.init_process_group("gloo")
rank = dist.get_rank()
step = int(state.read_text()) if state.exists() else 0
print(f"begins at step {step}", flush=True)
if step:
    sys.exit(0)
while not terminated:
    time.sleep(0.02)
    step += 1
if rank == 0:
    time.sleep(float(sys.argv[2]))
    state.write_text(str(step))
