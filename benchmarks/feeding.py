"""What the sampler and the hooks cost a step, and how long an epoch of a billion samples takes to begin.

Runs the same loop with torch's own ``DistributedSampler`` and with this library's loader and batch policies, in
one process, in turn, many times. The model is small, so that what remains is overhead. Prints a table and writes
``benchmarks/results/data.md``.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.distributed as dist
from measurements import machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from azureml_elastic import CheckpointPolicy, FixedGlobalBatch, FixedPerWorkerBatch, train
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.loader import LoaderContext
from azureml_elastic.train.data.map_loader import MapLoader
from azureml_elastic.train.data.position import Batching, Position
from azureml_elastic.train.data.sampling import DataSpec
from azureml_elastic.train.optim.exact_sum import ExactSum

HERE = Path(__file__).resolve()
PAGE = HERE.parent / "results" / "data.md"
STEP_SECONDS = 0.010
SAMPLES, BATCH, STEPS = 200_000, 32, 400
BILLION, MANY = 1_000_000_000, 20_000_000
LARGE_LAYERS, LARGE_LAYER, LARGE_TERMS = 24, 2048, 4

TORCH = "torch: DistributedSampler, DDP"
POLICIES = {
    "fixed global batch": FixedGlobalBatch(),
    "4 logical workers": FixedGlobalBatch(logical_workers=4),
    "fixed per worker, linear": FixedPerWorkerBatch(scaling="linear"),
    "fixed per worker, AdaScale": FixedPerWorkerBatch(scaling="adascale"),
    "4 logical workers, exact": FixedGlobalBatch(logical_workers=4, reduce="exact"),
}


def network() -> nn.Module:
    """Return a model of 24 parameters of 4,096 numbers each, for which hooks and loops count, not arithmetic."""
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def torch_training(stack: ExitStack, batch: int) -> tuple[DistributedDataParallel, Any, Any, DataLoader[Any]]:
    """Return model, optimizer, schedule and loader of a training run with torch alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    dataset = TensorDataset(torch.randn(SAMPLES, 64))
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return model, optimizer, schedule, DataLoader(dataset, batch, sampler=DistributedSampler(dataset))


def torch_loop(stack: ExitStack) -> Iterator[None]:
    """Train with torch alone; yields after each optimizer step."""
    model, optimizer, schedule, loader = torch_training(stack, BATCH)
    for (x,) in loader:
        loss_of(model, x).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield


def our_loop(stack: ExitStack, name: str) -> Iterator[None]:
    """Train with this library; yields after each optimizer step."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
    run = stack.enter_context(train.start(CheckpointPolicy(path=folder, every=None), batch=POLICIES[name]))
    model = run.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    schedule = run.schedule(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for (x,) in run.loader(TensorDataset(torch.randn(SAMPLES, 64)), global_batch_size=BATCH):
        run.backward(loss_of(model, x))
        if run.accumulating:
            continue
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.commit()
        yield


def plain_micro_batches(stack: ExitStack) -> Iterator[None]:
    """Accumulate over four micro-batches with torch alone, as the baseline of logical workers."""
    model, optimizer, schedule, loader = torch_training(stack, BATCH // 4)
    for index, (x,) in enumerate(loader):
        if index % 4 < 3:
            with model.no_sync():
                (loss_of(model, x) / 4).backward()
            continue
        (loss_of(model, x) / 4).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield


def seconds_of_a_step(loop: Callable[[ExitStack], Iterator[None]]) -> float:
    """Return the median CPU time of a step, which depends less than the wall time on what else the machine does."""
    with ExitStack() as stack:
        times = []
        steps = loop(stack)
        for _ in range(STEPS):
            next(steps, None)
            times.append(time.process_time())
        steps.close()
        return statistics.median(later - earlier for earlier, later in pairwise(times[50:]))


PHASES = ("batch from the loader", "backward pass", "optimizer", "schedule", "run.commit()")


def seconds_of_phases(kind: str) -> list[float]:
    """Return the median times of a step's phases, with torch or under a fixed global batch."""
    with ExitStack() as stack:
        dataset, run = TensorDataset(torch.randn(SAMPLES, 64)), None
        if kind == "torch":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
            model: nn.Module = DistributedDataParallel(network())
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            run = stack.enter_context(train.start(CheckpointPolicy(path=folder, every=None)))
            model = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        if run is None:
            batches = iter(DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset)))
        else:
            schedule = run.schedule(schedule)
            run.track(model=model, optimizer=optimizer, schedule=schedule)
            batches = iter(run.loader(dataset, global_batch_size=BATCH))
        found: list[list[float]] = [[] for _ in PHASES]
        for _ in range(STEPS):
            times = [time.process_time()]
            (x,) = next(batches)
            times.append(time.process_time())
            loss = loss_of(model, x)
            begun = time.process_time()
            loss.backward() if run is None else run.backward(loss)
            times.append(times[-1] + time.process_time() - begun)
            begun = time.process_time()
            optimizer.step()
            times.append(times[-1] + time.process_time() - begun)
            begun = time.process_time()
            schedule.step()
            times.append(times[-1] + time.process_time() - begun)
            optimizer.zero_grad()
            begun = time.process_time()
            if run is not None:
                run.commit()
            times.append(times[-1] + time.process_time() - begun)
            for phase, (earlier, later) in zip(found, pairwise(times), strict=True):
                phase.append(later - earlier)
        return [statistics.median(phase[50:]) for phase in found]


def phases(runs: int) -> str:
    """Return what each phase of a step takes more than torch's: medians of the differences within a run."""
    pairs = [(seconds_of_phases("torch"), seconds_of_phases("ours")) for _ in range(runs)]
    rows = ["| | torch | azureml-elastic | more | of a 10 ms step |", "| --- | --- | --- | --- | --- |"]
    more = []
    for index, name in enumerate(PHASES):
        torchs, ours = (statistics.median(pair[side][index] for pair in pairs) for side in (0, 1))
        more.append(statistics.median(pair[1][index] - pair[0][index] for pair in pairs))
        cells = f"{torchs * 1e6:.0f} µs | {ours * 1e6:.0f} µs | {more[-1] * 1e6:.0f} µs | {more[-1] / STEP_SECONDS:.2%}"
        rows.append(f"| {name} | {cells} |")
    hooks = sum(more[:-1])
    rows.append(f"| sampler, weights and hooks together | | | {hooks * 1e6:.0f} µs | {hooks / STEP_SECONDS:.2%} |")
    return "\n".join(rows)


def measure(runs: int) -> dict[str, list[float]]:
    """Return for each loop its times, one for each run, all loops in turn."""
    loops = {TORCH: torch_loop, "torch: 4 micro-batches, no_sync": plain_micro_batches}
    loops |= {name: lambda stack, name=name: our_loop(stack, name) for name in POLICIES}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(runs):
        for name, loop in loops.items():
            found[name].append(seconds_of_a_step(loop))
    return found


def exact_sums(runs: int) -> str:
    """Return what an exact sum of many numbers costs, beside adding up the same gradients as floats."""
    with ExitStack() as stack:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        like = [torch.zeros(LARGE_LAYER, LARGE_LAYER) for _ in range(LARGE_LAYERS)]
        terms = [[torch.randn_like(each) for each in like] for _ in range(LARGE_TERMS)]
        total, found = ExactSum(like), []
        for _ in range(runs):
            begun = time.process_time()
            for term in terms:
                for sum_, gradient in zip(like, term, strict=True):
                    sum_.add_(gradient)
            passed = time.process_time()
            for term in terms:
                total.add(term)
            total.finish()
            found.append((passed - begun, time.process_time() - passed))
    floats, exact = (statistics.median(times) for times in zip(*found, strict=True))
    ratio = statistics.median(ours / theirs for theirs, ours in found)
    rows = ["| | CPU time | for a gradient |", "| --- | --- | --- |"]
    rows.append(f"| added up as floats | {floats:.2f} s | {floats / LARGE_TERMS:.3f} s |")
    rows.append(f"| exact sum | {exact:.2f} s, {ratio:.2f} times as long | {exact / LARGE_TERMS:.3f} s |")
    return "\n".join(rows)


def first_batch(kind: str, length: int) -> tuple[float, float]:
    """Return the seconds until the first batch of an epoch, and the megabytes that it took, in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    if kind == "torch":
        sampler = DistributedSampler(range(length), num_replicas=8, rank=3)
        iterator = iter(sampler)
        [next(iterator) for _ in range(BATCH)]
    else:
        position = Position(WorkerIdentity(3, 0, 8, 0))
        spec = DataSpec(length, global_batch_size=8 * BATCH, seed=0, shuffle=True, drop_last=False)
        context = LoaderContext(position, torch.device("cpu"), Batching(FixedGlobalBatch()))
        loader = MapLoader(range(length), position.add("train", spec), context)
        next(iter(loader))
    seconds = time.perf_counter() - begun
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def in_a_process_of_its_own(kind: str, length: int) -> tuple[float, float]:
    words = [sys.executable, str(HERE), "--first-batch", kind, str(length)]
    seconds, megabytes = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-2:]
    return float(seconds), float(megabytes)


def tables(runs: int) -> tuple[str, str]:
    """Return what a step costs, and what the begin of an epoch does."""
    measured = measure(runs)
    medians = {name: statistics.median(times) for name, times in measured.items()}
    rows = ["| | a step | more than torch | of a 10 ms step |", "| --- | --- | --- | --- |"]
    for name, seconds in medians.items():
        peers = measured["torch: 4 micro-batches, no_sync" if "4" in name else TORCH]
        difference = statistics.median(ours - peer for ours, peer in zip(measured[name], peers, strict=True))
        more = "" if name.startswith("torch") else f"{difference * 1e6:.0f} µs"
        part = "" if name.startswith("torch") else f"{difference / STEP_SECONDS:.2%}"
        rows.append(f"| {name} | {seconds * 1e6:.0f} µs | {more} | {part} |")
    begins = ["| | samples | first batch after | memory |", "| --- | --- | --- | --- |"]
    for name, kind, length in (
        ("DistributedSampler", "torch", MANY),
        ("azureml-elastic", "ours", MANY),
        ("azureml-elastic", "ours", BILLION),
    ):
        found = [in_a_process_of_its_own(kind, length) for _ in range(3)]
        seconds, megabytes = (statistics.median(values) for values in zip(*found, strict=True))
        begins.append(f"| {name} | {length:,} | {seconds:.3f} s | {megabytes:.0f} MB |")
    return "\n".join(rows), "\n".join(begins)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="print, but leave the page as it is")
    parser.add_argument("--first-batch", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.first_batch is not None:
        kind, length = arguments.first_batch
        print(*first_batch(kind, int(length)))
        return 0
    load = os.getloadavg()[0]
    parts = phases(arguments.runs)
    steps, begins = tables(arguments.runs)
    sums = exact_sums(arguments.runs)
    print(f"{parts}\n\n{steps}\n\n{sums}\n\n{begins}")
    if not arguments.dry:
        page = Template((HERE.parent / "feeding_page.md").read_text("utf-8")).substitute(
            date=f"{datetime.now().astimezone():%Y-%m-%d}",
            machine=machine(),
            load=f"{load:.1f}",
            runs=arguments.runs,
            phases=parts,
            steps=steps,
            large=f"{LARGE_LAYERS * LARGE_LAYER**2:,}",
            terms=LARGE_TERMS,
            sums=sums,
            begins=begins,
        )
        PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
