"""A script without a session whose last save is not the end of its work: ``exporting.py LOG``.

Its folder is in ``STATE_FOLDER``. It begins each start with its state, if there is one, and saves it after each epoch.
The epoch in which rank 0's ``LOG`` says what a new node waits for is its last one. After it the script saves its state
and averaged weights, again from a thread, removes the state, as there is nothing left to continue, calibrates what it
has trained with an optimizer of its own, closes its process group, and exports for as long as a new node could take
for an invitation. What is saved last is saved at its exit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)
log, folder = Path(sys.argv[1]), Path(os.environ["STATE_FOLDER"])
state = folder / "last.pt"


def save(value: Any, path: Path) -> None:
    torch.save(value, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def calibrate(steps: int) -> None:
    temperature = torch.nn.Parameter(torch.ones(1))
    own = torch.optim.SGD([temperature], lr=0.1)
    for _ in range(steps):
        own.zero_grad()
        temperature.pow(2).sum().backward()
        own.step()
        time.sleep(0.02)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epoch = torch.load(state) if state.exists() else 0
any(folder.iterdir())  # as it does for the newest of its checkpoints
print(f"begins at epoch {epoch}", flush=True)
dist.barrier()  # all have read
last = torch.zeros(1)
while not last:
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
    # Alone it waits for the new node, whatever the machine's speed: a save before the last one would let the node in.
    while dist.get_world_size() == 1 and "waiting, as the program" not in log.read_text():
        time.sleep(0.05)
    last += rank == 0 and "waiting, as the program" in log.read_text()
    dist.all_reduce(last)
    epoch += 1
    if rank == 0:
        save(epoch, state)
if rank == 0:
    save(model.state_dict(), folder / "averaged.pt")
    atexit.register(save, "exit", folder / "final.pt")
    time.sleep(3)
    thread = threading.Thread(target=save, args=(epoch, state))
    thread.start()
    thread.join()
    time.sleep(3)
    state.unlink()
    calibrate(100)
dist.destroy_process_group()
if rank == 0:
    optimizer.step()
    save(epoch, folder / "exported.pt")
    time.sleep(3)
    optimizer.step()
    time.sleep(1)
print(f"ends after epoch {epoch}", flush=True)
