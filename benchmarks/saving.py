"""Cost of checkpoints: training pause, time until durable, and time of a restore, compared with torch.

Starts ranks that hold the same state of about 1 GB, as in data parallelism, and save it alternately in each way. The
pause is the duration of the save call. Prints tables and writes ``benchmarks/results/checkpoints.md``.
"""

from __future__ import annotations

import argparse
import gc
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measurements import machine, write_lines
from torch import nn

from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.load.offers import Kind, Offer
from azureml_elastic.checkpoint.snapshots.copies import Copy, open_source
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent

Way = Callable[[], Callable[[], Any]]
HERE = Path(__file__).resolve()
LINES = HERE.parent / "results" / "checkpoints.jsonl"
PAGE = HERE.parent / "results" / "checkpoints.md"
CADENCE_SECONDS = 30.0

COPY = "copy of a rank's share"
OURS = "azureml-elastic"
TORCH_SAVE = "torch.save"
DCP_SAVE = "DCP save"
DCP_ASYNC = "DCP async_save, thread"
DCP_PROCESS = "DCP async_save, process and shared memory"
DCP_LOAD = "DCP load, nothing verified"
WHOLE_COPY = "copy of the whole state"
HAND_OVER = "ours, handed over and restored on one node"
FROM_MEMORY = "ours, from memory"
FROM_PEER = "ours, from a peer"
FROM_DISK = "ours, from disk, every byte verified"
RESTORES = (WHOLE_COPY, HAND_OVER, FROM_MEMORY, FROM_PEER, FROM_DISK, DCP_LOAD)


@dataclass(frozen=True)
class Save:
    """One save or restore.

    Args:
        name: how.
        ranks: that took part.
        run: its number, from 1.
        stall: seconds for which the slowest rank could not train.
        durable: seconds until all of it was on the disk; 0 for a restore.
        nbytes: size in bytes of the state that each rank holds.
        cpu: seconds of CPU time of the busiest rank, of a restore.
    """

    name: str
    ranks: int
    run: int
    stall: float
    durable: float
    nbytes: int
    cpu: float = 0.0


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
    world = ProcessGroups(WorkerIdentity(rank, rank, int(os.environ["WORLD_SIZE"]), 0), torch.device("cpu"))
    world.open()
    state = State(megabytes)
    tracked = TrackedState({"model": state.model, "optimizer": state.optimizer})
    storage = LocalStorage(folder / "ours")
    storage.make("")
    policy = CheckpointPolicy(path=str(folder / "ours"))
    ours = Checkpoints(policy, storage, world, StandaloneAgent(storage, world.identity))
    ways = _ways(state, tracked, ours, folder)
    ours.prepare(tracked)
    source = torch.empty(state.nbytes // dist.get_world_size() // 4).fill_(1.0)
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
    # The memory of torch's stagers and the cached pages of files leave none free on a machine of this size, so that new
    # memory would cost its reclaim too.
    del source, target, ways, save
    gc.collect()
    if rank == 0:
        (folder / "torch.pt").unlink()
        for path in folder.glob("DCP*"):
            shutil.rmtree(path)
    dist.barrier()
    _restore(state, tracked, ours, world, folder)
    world.close()


def _ways(state: State, tracked: TrackedState, ours: Checkpoints, folder: Path) -> dict[str, Way]:
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


def _asynchronous(state: State, folder: Path, group: Any) -> dict[str, Way]:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    found: dict[str, Way] = {}
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


def _restore(state: State, tracked: TrackedState, ours: Checkpoints, world: ProcessGroups, folder: Path) -> None:
    plain, tensors = tracked.collect(is_main=True)
    snapshot = Snapshot(1, plain, None, tensors=local_chunks(tensors))
    memory, handed_over = snapshot.to_memory(), list[int]()
    source = torch.empty(state.nbytes // 4).fill_(1.0)
    target = torch.empty_like(source).fill_(0.0)
    rank, size = world.control.rank, world.control.world_size
    offers = [Offer(Kind.WHOLE, 1, 1, "", 1, holder, holder) for holder in range(size)]

    def read(chosen: list[Offer], content: Snapshot) -> None:
        copies = [Copy(each, lambda: content, 1, None, 0) for each in chosen if each.holder == rank]
        found = open_source(chosen, copies, world.control)
        assert found is not None
        if copies and len(chosen) < size:
            found.send(world.control)
            kept = {chunk.name: tensor for chunk, tensor in content.tensors.items()}
        else:
            kept = found.read(tracked.targets(found.state), world.control)
        with torch.no_grad():
            tracked.restore(found.state, kept)

    def from_memory(descriptor: int = memory) -> None:
        read(offers, Snapshot.from_memory(f"/proc/{os.getpid()}/fd/{descriptor}"))

    def hand_over() -> None:
        handed_over.append(snapshot.to_memory())
        from_memory(handed_over[-1])

    def from_peer() -> None:
        read(offers[:-1], snapshot)

    def from_dcp() -> None:
        document = state.state_dict()
        dcp.load(document, checkpoint_id=folder / "dcp")

    ours.committed()
    ways = {
        WHOLE_COPY: lambda: target.copy_(source),
        HAND_OVER: hand_over,
        FROM_MEMORY: from_memory,
        FROM_PEER: from_peer,
        FROM_DISK: lambda: ours.restore(tracked),
        DCP_LOAD: from_dcp,
    }
    for number in range(4):  # the first one is for warmth
        for name, way in ways.items():
            while handed_over:  # by the agent, after the first step
                os.close(handed_over.pop())
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            way()
            cpu = time.process_time() - cpu
            dist.barrier()
            _note(number, name, time.perf_counter() - began, 0.0, state.nbytes, cpu)


def _note(run: int, name: str, stall: float, durable: float, nbytes: int, cpu: float = 0.0) -> None:
    worst = torch.tensor([stall, durable, cpu], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0 and run > 0:
        print(
            json.dumps(asdict(Save(name, dist.get_world_size(), run, *worst[:2].tolist(), nbytes, float(worst[2])))),
            flush=True,
        )


def measure(megabytes: int, runs: int, ranks: int) -> Iterator[Save]:
    """Let so many ranks measure, and yield what they find."""
    folder = Path(tempfile.mkdtemp(prefix="bench-saving-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    try:
        processes = []
        for rank in range(ranks):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            words = [sys.executable, str(HERE), "--mb", str(megabytes), "--runs", str(runs), "--rank-in", str(folder)]
            environment = {**os.environ, **variables}
            with (folder / f"{rank}.log").open("w") as errors:  # torch logs a lot
                processes.append(
                    subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
                )
        first = processes[0].stdout
        assert first is not None
        for line in first:
            if line.startswith("{"):
                yield Save(**json.loads(line))
        for rank, process in enumerate(processes):
            if process.wait() != 0:
                output = (folder / f"{rank}.log").read_text("utf-8")[-3000:]
                raise RuntimeError(f"rank {rank} ended with {process.returncode}: {output}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(saves: Sequence[Save]) -> str:
    """Return the medians of one number of ranks as a table."""
    stalls, durables = _medians(saves, lambda save: save.stall), _medians(saves, lambda save: save.durable)
    best = min(stalls[name] for name in (DCP_ASYNC, DCP_PROCESS))
    head = ["", "stall", f"of {CADENCE_SECONDS:g} s", "copies", "of DCP's best stall", "durable after"]
    rows = [head, ["---"] * len(head)]
    for name in (COPY, OURS, DCP_ASYNC, DCP_PROCESS, DCP_SAVE, TORCH_SAVE):
        stall = stalls[name]
        cells = [
            f"{stall:.3f} s",
            f"{stall / CADENCE_SECONDS:.2%}",
            f"{stall / stalls[COPY]:.1f}",
            f"{stall / best:.2f}",
        ]
        rows.append([name, *cells, "" if name == COPY else f"{durables[name]:.2f} s"])
    cpus = _medians(saves, lambda save: save.cpu)
    rows += [["restore", "seconds", "", "copies of all", "of DCP's", "copies, in CPU time"]]
    for name in RESTORES:
        copies = f"{stalls[name] / stalls[WHOLE_COPY]:.1f}"
        ratios = f"{stalls[name] / stalls[DCP_LOAD]:.2f}", f"{cpus[name] / cpus[WHOLE_COPY]:.1f}"
        rows.append([name, f"{stalls[name]:.3f} s", "", copies, *ratios])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _medians(saves: Sequence[Save], what: Callable[[Save], float]) -> dict[str, float]:
    names = dict.fromkeys(save.name for save in saves)
    return {name: statistics.median(what(save) for save in saves if save.name == name) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="of state, with two ranks")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dry", action="store_true", help="print, but leave the page as it is")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_in is not None:
        rank_main(arguments.mb, arguments.runs, arguments.rank_in)
        return 0
    load = os.getloadavg()[0]
    # DCP needs several copies of the state for each rank: more ranks get less each.
    sizes = {ranks: arguments.mb * 2 // ranks for ranks in arguments.ranks}
    found = [save for ranks, size in sizes.items() for save in measure(size, arguments.runs, ranks)]
    tables = [
        f"## {ranks} ranks, {sizes[ranks]} MiB of state\n\n{table([save for save in found if save.ranks == ranks])}"
        for ranks in arguments.ranks
    ]
    print("\n\n".join(tables))
    if not arguments.dry:
        write_lines(found, LINES)
        page = Template((HERE.parent / "saving_page.md").read_text("utf-8")).substitute(
            date=f"{datetime.now().astimezone():%Y-%m-%d}",
            machine=machine(),
            load=f"{load:.1f}",
            runs=arguments.runs,
            tables="\n\n".join(tables),
        )
        PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
