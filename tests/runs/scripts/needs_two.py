"""A script without a session that can load its state with two workers only: ``needs_two.py LOG``.

Its folder is in ``STATE_FOLDER``. Two workers that find a state load it and end. One worker fails, at its second start
once rank 0's ``LOG`` says that a node waits, for which it leaves a mark.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

log, folder = Path(sys.argv[1]), Path(os.environ["STATE_FOLDER"])
state, failed = folder / "sharded.pt", folder / "failed"
if os.environ["WORLD_SIZE"] == "1":
    if failed.exists():
        (folder / "started-again").touch()
    while failed.exists() and "waiting, as the program" not in log.read_text():
        time.sleep(0.05)
    failed.touch()
    raise ValueError("the state of 2 ranks cannot be loaded by 1")
dist.init_process_group("gloo")
dist.barrier()
if not state.exists():
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(1, state)
    time.sleep(60)
dist.barrier()
print("loaded by 2", flush=True)
