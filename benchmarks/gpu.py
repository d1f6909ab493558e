"""What GPUs cost here: stall of a checkpoint, the guard before an update, a killed worker, and a warm start.

Runs unattended in less than 8 minutes on a machine with an NVIDIA GPU, and writes ``benchmarks/results/gpu.md``.
Without one it says so, and measures nothing. ``--dry`` measures little, also on a CPU, to see that all parts run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measurements import machine
from torch import nn

from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import CheckpointPolicy, ElasticDistribution
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ledger.events import Progress, WorkerFailed, WorkersStarted
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.session.step_checks import UpdateGuard

HERE = Path(__file__).resolve()
PAGE = HERE.parent / "results" / "gpu.md"
LIMIT_S = 460.0
"""Time after which no further part is begun."""

STEP_SECONDS = (0.02, 0.1, 0.4)
NOT_RUN = "not run"

SCRIPT = """
import os, signal, sys, time
began = float(os.environ.get("BEGAN", "0"))
import torch
from torch import nn
from torch.utils.data import TensorDataset
from azureml_elastic import train
victim = sys.argv[1]
with train.start() as run:
    model = run.wrap(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    data = torch.ones(4000, 64)
    for _ in run.epochs(1):
        for x, in run.loader(TensorDataset(data), global_batch_size=100):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            if run.steps == 1:
                print("first step", time.time() - began, flush=True)
            if run.steps == 20 and run.round == 1 and str(run.local_rank) == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
"""


@dataclass(frozen=True)
class Row:
    """A row of the table: what was measured, of which system, and the result or why there is none."""

    what: str
    system: str
    result: str


class Uninterrupted:
    """An agent that holds states and never interrupts."""

    holds_snapshots = True

    def __init__(self) -> None:
        self._interrupted = threading.Event()

    def wait_interrupted(self, timeout: float) -> bool:
        """Return whether the round was interrupted, after a while."""
        return self._interrupted.wait(timeout)


def wait(device: torch.device) -> None:
    """Wait for the device."""
    device_of(device).synchronize()


def checkpoints(device: torch.device, megabytes: int, groups: ProcessGroups) -> Iterator[Row]:
    """Measure how long training stops for a checkpoint, beside DCP's asynchronous one with pinned memory."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict

    width = 2048
    layers = max(1, megabytes * 2**20 // (12 * width * width))  # weights and two moments of four bytes
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-"))
    tracked = TrackedState({"model": model, "optimizer": optimizer})
    storage = LocalStorage(folder / "ours")
    (folder / "ours").mkdir()
    agent = StandaloneAgent(storage, groups.identity, handles_signals=False)
    ours = Checkpoints(CheckpointPolicy(path=str(folder / "ours"), keep=2), storage, groups, agent)
    ours.prepare(tracked)
    pinned = device.type == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
        )
    )
    group = dist.new_group(backend="gloo")

    def save_ours(step: int) -> Callable[[], Any]:
        ours.begin(step, tracked, None)
        return ours.settle

    def save_dcp(_: int) -> Callable[[], Any]:
        weights, moments = get_state_dict(model, optimizer)
        future = dcp.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=folder / "dcp",
            process_group=group,
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.THREAD,
            async_stager=stager,
        )
        return getattr(future, "upload_completion", future).result

    try:
        for system, save in (("DCP async_save, pinned", save_dcp), ("azureml-elastic", save_ours)):
            stalls, durables = [], []
            for step in range(1, 5):
                wait(device)
                began = time.perf_counter()
                durable = save(step)
                wait(device)
                stalls.append(time.perf_counter() - began)
                durable()
                durables.append(time.perf_counter() - began)
            stall, durable_after = statistics.median(stalls[1:]), statistics.median(durables[1:])  # the first is warmth
            yield Row(
                f"checkpoint of {megabytes} MiB: stall / durable", system, f"{stall:.3f} s / {durable_after:.1f} s"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def guard(device: torch.device, steps: int) -> Iterator[Row]:
    """Measure steps of several lengths without and with the guard."""
    width = 4096 if device.type == "cuda" else 64
    for seconds in STEP_SECONDS:
        layers = 4
        while True:
            model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(4)))
            batch = torch.randn(1024 if device.type == "cuda" else 8, width, device=device)
            took = statistics.median(_steps(model, batch, layers, 3, None, device))
            if took >= seconds * 0.8 or device.type == "cpu":
                break
            layers = max(layers + 1, int(layers * min(8.0, seconds / took)))
        plain, guarded = [], []
        for _ in range(3):  # in turn, so that both see the same machine
            plain += _steps(model, batch, layers, steps, None, device)
            watch = UpdateGuard(device_of(device), Uninterrupted())  # type: ignore[arg-type]
            watch.enter(2)
            guarded += _steps(model, batch, layers, steps, watch, device)
        without, with_ = statistics.median(plain), statistics.median(guarded)
        what = f"a step of {seconds * 1000:.0f} ms"
        yield Row(what, "without / with guard", f"{without * 1000:.2f} / {with_ * 1000:.2f} ms")
        yield Row(what, "cost of the guard", f"{with_ / without - 1:+.1%}")


def _steps(
    model: nn.Sequential,
    batch: torch.Tensor,
    layers: int,
    count: int,
    watch: UpdateGuard | None,
    device: torch.device,
) -> list[float]:
    """Train, and return the mean time of a step in each of some blocks: the host may run ahead within one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    if watch is not None:
        optimizer.register_step_pre_hook(lambda *_: watch.before_update())
    found = []
    for _ in range(3):
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            value = batch
            for layer in range(layers):
                value = torch.tanh(model[layer % len(model)](value))
            value.square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.end_step()
        wait(device)
        found.append((time.perf_counter() - began) / count)
    return found[1:]


def runs(folder: Path, processes: int) -> Iterator[Row]:
    """Kill a worker of a real run; measure the interruption, and the first step beside a plain start."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    began = time.time()
    plain = subprocess.run(
        [sys.executable, str(script), "none"],
        env={**os.environ, "BEGAN": str(began)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    cold = float(plain.stdout.partition("first step ")[2].split()[0])
    yield Row("from the start of a process to its first step", "python train.py", f"{cold:.2f} s")
    distribution = ElasticDistribution(process_count_per_instance=processes)
    report = LocalCluster((1, 1), run_dir=folder / "run", audit=True, distribution=distribution).run([str(script), "0"])
    if report.exit_code != 0 or report.audit is None:
        raise RuntimeError(f"The run has failed: {report.message}; its logs are in {report.paths.logs}")
    events = list(read_events(report.paths.events))
    failed = next(event for event in events if isinstance(event, WorkerFailed))
    started = next(event for event in events if isinstance(event, WorkersStarted) and event.round > failed.round)
    step = min(event.time for event in events if isinstance(event, Progress) and event.round > failed.round)
    yield Row("the same", "azureml-elastic, forked", f"{step - started.time:.2f} s")
    yield Row("a worker's SIGKILL, until the next step", f"{processes} on one node", f"{step - failed.time:.2f} s")
    if processes > 1:  # a lone worker takes its memory along
        yield Row("steps trained again", f"{processes} on one node", str(report.audit.rolled_back_steps))


def measure(device: torch.device, megabytes: int, steps: int) -> Iterator[Row]:
    """Measure everything that this machine can, and say what it cannot."""
    began = time.monotonic()
    gpus = torch.cuda.device_count()
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-runs-"))
    try:
        yield from runs(folder, max(1, gpus))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if gpus < 2:
        yield Row("a worker's SIGKILL with NCCL", "2 workers", f"{NOT_RUN}: NCCL wants a GPU for each, here are {gpus}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    groups = ProcessGroups(WorkerIdentity(0, 0, 1, 0), device)
    groups.open()
    yield from guard(device, steps)
    if time.monotonic() - began > LIMIT_S / 2:
        yield Row(f"checkpoint of {megabytes} MiB", "", f"{NOT_RUN}: the time was over")
    else:
        yield from checkpoints(device, megabytes, groups)
    groups.close()


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = ["| what | system | result |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.what} | {row.system} | {row.result} |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=10 * 1024, help="of state in a checkpoint")
    parser.add_argument("--dry", action="store_true", help="small, also on a CPU; the page stays as it is")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry:
        print("No NVIDIA GPU: torch.cuda.is_available() is false here. Nothing is measured, and the page stays.")
        return 0
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = []
    for row in measure(device, 32 if arguments.dry else arguments.mb, 3 if arguments.dry else 8):
        print(f"{row.what}: {row.system}: {row.result}", flush=True)
        rows.append(row)
    if not arguments.dry:
        page = Template((HERE.parent / "gpu_page.md").read_text("utf-8")).substitute(
            measured=f"Measured on {datetime.now().astimezone():%Y-%m-%d}: {torch.cuda.get_device_name(0)}, "
            f"{torch.cuda.device_count()} of them, {machine()}.",
            table=table(rows),
        )
        PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
