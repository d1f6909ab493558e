"""Processes that hang, each in another way: :func:`stand`, or ``hangs.py WAY FOLDER RANK``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.stack_dump import register_stack_dump


class Printed:
    """Replacement of the pipe to the test in a process without one."""

    def send(self, word: str) -> None:
        print(word, flush=True)


ears = [Printed()]
"""Receivers of the signal; the last one counts."""


def stand(way: str, folder: Path, rank: int, argument: str = "", pipe=None) -> None:
    """Register, unless the process is to stay unregistered, and then hang in the named way."""
    if pipe is not None:
        ears.append(pipe)
    if way != "stranger":
        register_stack_dump(folder, WorkerIdentity(rank=rank, local_rank=rank, world_size=2, round=1))
    globals()[way](argument)


def ready() -> None:
    ears[-1].send("ready")


def forever() -> None:
    while True:
        time.sleep(3600)


def asleep(_: str) -> None:
    ready()
    forever()


stranger = asleep


def looping(_: str) -> None:
    ready()
    while True:
        pass


def matching(_: str) -> None:
    """Hold the GIL in C for longer than the test waits."""
    ready()
    re.match(r"(a+)+$", "a" * 80 + "b")


def locked(_: str) -> None:
    lock = threading.Lock()
    lock.acquire()
    ready()
    lock.acquire()


def many_threads(_: str) -> None:
    for _number in range(30):
        threading.Thread(target=forever, daemon=True).start()
    ready()
    asleep("")


def deep(_: str) -> None:
    def descend(levels: int) -> None:
        if levels:
            descend(levels - 1)
        asleep("")

    descend(300)


def unregistered(_: str) -> None:
    """Lose the descriptor, like a program that closes descriptors that it did not open."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_symlink() and str(descriptor.readlink()).endswith(".stacks"):
            os.close(int(descriptor.name))
    ready()
    forever()


def with_children(_: str) -> None:
    """Leave four children: two forks of this process, another program, and another Python."""
    for _number in range(2):
        if os.fork() == 0:
            in_a_fork()
    subprocess.Popen(["sleep", "3600"])
    subprocess.Popen(
        [sys.executable, "-c", "import time\ndef in_another_python(): time.sleep(3600)\nin_another_python()"]
    )
    ready()
    forever()


def in_a_fork() -> None:
    forever()


def loading(_: str) -> None:
    from torch.utils.data import DataLoader

    iterator = iter(DataLoader(Stuck(), num_workers=2, multiprocessing_context="fork"))
    ready()
    next(iterator)


class Stuck:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        forever()
        return index


def reducing(argument: str) -> None:
    """Rank 0 waits in a collective, for a peer that sleeps until a file exists."""
    import torch
    import torch.distributed as dist

    port, number, go = argument.split(":", 2)
    rank = int(number)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    ready()
    while rank == 1 and not Path(go).exists():
        time.sleep(0.05)
    value = torch.ones(1) * (rank + 1)
    dist.all_reduce(value)
    ears[-1].send(f"sum {int(value)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    stand(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
