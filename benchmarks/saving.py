"""What a checkpoint costs: for how long training stands still, and how long a restore takes; beside torch's own ways.

``python benchmarks/saving.py`` starts two ranks that hold the same state of about 1 GB, as data parallelism does, and
save it in turn in each way, several times. A loop of small steps runs between the saves; what the call of a save takes
is its stall. Prints a table and the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from azureml_elastic.checkpoints.local_storage import LocalStorage
from azureml_elastic.spec import CheckpointPolicy
from azureml_elastic.train.agent import Identity
from azureml_elastic.train.checkpoint import Checkpoints
from azureml_elastic.train.snapshot import Snapshot
from azureml_elastic.train.standalone import StandaloneAgent
from azureml_elastic.train.state import TrackedState
from azureml_elastic.train.world import World

Save = Callable[[], Callable[[], Any]]
HERE = Path(__file__)
RANKS = 2
CADENCE_SECONDS = 30.0

COPY = "memcpy of a rank's share, to warm memory"
OURS = "azureml-elastic"
TORCH_SAVE = "torch.save, rank 0, fsync"
DCP_SAVE = "DCP save"
DCP_ASYNC = "DCP async_save, thread"
DCP_PROCESS = "DCP async_save, process and shared memory"


class State:
    """Model and optimizer, with their steps behind them."""

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        width = 1024
        layers = max(1, megabytes * 2**20 // (12 * width * width))  # weights and Adam's two moments, four bytes each
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    @property
    def nbytes(self) -> int:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(t.numel() * t.element_size() for t in [*self.model.parameters(), *moments])


def rank_main(megabytes: int, runs: int, folder: Path) -> None:
    """Measure everything on one rank, together with the other one; rank 0 prints JSON lines."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    world = World(Identity(rank, rank, RANKS, 0), torch.device("cpu"))
    world.open()
    state = State(megabytes)
    tracked = TrackedState({"model": state.model, "optimizer": state.optimizer})
    storage = LocalStorage(folder / "ours")
    storage.make("")
    policy = CheckpointPolicy(path=str(folder / "ours"))
    ours = Checkpoints(policy, storage, world, StandaloneAgent(storage, world.identity))
    ways = _ways(state, tracked, ours, folder)
    ours.prepare(tracked)
    time.sleep(3)  # while training goes on
    source = torch.empty(state.nbytes // RANKS // 4).fill_(1.0)
    target = torch.empty_like(source).copy_(source)
    for run in range(runs + 1):  # the first one is for warmth
        dist.barrier()
        began = time.perf_counter()
        target.copy_(source)
        _note(run, COPY, time.perf_counter() - began, 0.0, state.nbytes)
        for name, save in ways.items():
            dist.barrier()
            began = time.perf_counter()
            durable = save()
            stall = time.perf_counter() - began
            durable()
            dist.barrier()
            _note(run, name, stall, time.perf_counter() - began, state.nbytes)
    _restore(state, tracked, ours, world, folder)
    world.close()


def _ways(state: State, tracked: TrackedState, ours: Checkpoints, folder: Path) -> dict[str, Save]:
    """Return the ways to save: functions that return when training may go on, each with one that waits for the end."""
    steps = itertools.count(1)

    def save_ours() -> Callable[[], Any]:
        ours.begin(next(steps), tracked, None)
        return ours.settle

    def save_torch() -> Callable[[], Any]:
        if dist.get_rank() == 0:
            with (folder / "torch.pt").open("wb") as stream:
                torch.save(state.state_dict(), stream)
                stream.flush()
                os.fsync(stream.fileno())
        dist.barrier()
        return lambda: None

    def save_dcp() -> Callable[[], Any]:
        dcp.save(state.state_dict(), checkpoint_id=folder / "dcp")
        return lambda: None

    group = dist.new_group(backend="gloo")
    return {OURS: save_ours, TORCH_SAVE: save_torch, DCP_SAVE: save_dcp, **_asynchronous(state, folder, group)}


def _asynchronous(state: State, folder: Path, group: Any) -> dict[str, Save]:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    found: dict[str, Save] = {}
    thread = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    shared = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    for name, stager, kind in [
        (DCP_ASYNC, thread, dcp.state_dict_saver.AsyncCheckpointerType.THREAD),
        (DCP_PROCESS, shared, dcp.state_dict_saver.AsyncCheckpointerType.PROCESS),
    ]:

        def save(stager: Any = stager, kind: Any = kind, where: str = name[:20]) -> Callable[[], Any]:
            future = dcp.async_save(
                state.state_dict(),
                checkpoint_id=folder / where.replace(" ", "-"),
                process_group=group,
                async_checkpointer_type=kind,
                async_stager=stager,
            )
            return getattr(future, "upload_completion", future).result

        found[name] = save
    return found


def _restore(state: State, tracked: TrackedState, ours: Checkpoints, world: World, folder: Path) -> None:
    def timed(name: str, action: Callable[[], Any]) -> None:
        for number in range(3):
            dist.barrier()
            began = time.perf_counter()
            action()
            dist.barrier()
            _note(number, name, time.perf_counter() - began, 0.0, state.nbytes)

    plain, tensors = tracked.collect(is_main=True)
    snapshot = Snapshot(1, plain, None, tensors=tensors)
    descriptor = snapshot.to_memory()
    path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def from_memory() -> None:
        kept = Snapshot.from_memory(path)
        with torch.no_grad():
            tracked.restore(kept.state, kept.tensors)

    def from_peer() -> None:
        received = Snapshot.broadcast(snapshot if world.control.rank == 0 else None, 0, world.control)
        with torch.no_grad():
            tracked.restore(received.state, received.tensors)

    def from_dcp() -> None:
        document = state.state_dict()
        dcp.load(document, checkpoint_id=folder / "dcp")

    ours.committed()
    timed("restore: ours, from memory", from_memory)
    timed("restore: ours, from a peer", from_peer)
    timed("restore: ours, from disk, every byte verified", lambda: ours.restore(tracked))
    timed("restore: DCP load, nothing verified", from_dcp)


def _note(run: int, name: str, stall: float, durable: float, nbytes: int) -> None:
    worst = torch.tensor([stall, durable], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0 and run > 0:
        line = {"name": name, "run": run, "stall": worst[0].item(), "durable": worst[1].item(), "nbytes": nbytes}
        print(json.dumps(line), flush=True)


def _lines(megabytes: int, runs: int) -> Iterator[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="bench-saving-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    try:
        processes = []
        for rank in range(RANKS):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            words = [
                sys.executable,
                str(HERE),
                "--rank",
                "--mb",
                str(megabytes),
                "--runs",
                str(runs),
                "--at",
                str(folder),
            ]
            processes.append(
                subprocess.Popen(words, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
            )
        first = processes[0].stdout
        assert first is not None
        for line in first:
            if line.startswith("{"):
                yield json.loads(line)
        for process in processes:
            if process.wait() != 0:
                raise RuntimeError(f"a rank ended with {process.returncode}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="of state")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.mb, arguments.runs, arguments.at)
        return 0
    found: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(arguments.mb, arguments.runs):
        found.setdefault(line["name"], []).append(line)
    medians = {name: statistics.median(line["stall"] for line in lines) for name, lines in found.items()}
    copy = medians[COPY]
    for name, lines in found.items():
        durable = statistics.median(line["durable"] for line in lines)
        stall = medians[name]
        print(
            f"{name:48} {stall:7.3f} s  {stall / CADENCE_SECONDS:6.2%} of {CADENCE_SECONDS:g} s"
            f"  {stall / copy:6.1f} x memcpy  durable after {durable:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
