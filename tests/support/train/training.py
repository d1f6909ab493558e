"""Functions of the processes in the tests of loaders and evaluation."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train
from azureml_elastic.distributed.data_parallel import ElasticDataParallel
from azureml_elastic.distributed.process import WorkerSettings, close_group, open_group
from azureml_elastic.environment import names
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.ledger.reading import read_samples
from azureml_elastic.ledger.samples import audit_samples
from tests.support.train import workers

MADE = []
"""Sessions that a test has started in its own process, and the next one does not continue."""


def forget_environment(monkeypatch):
    for name in names.OWN:
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def train_on_shards(folder, lengths, stop_after):
    """Train three epochs with a checkpoint every three steps; end at a number of steps as if killed by SIGKILL."""
    shards = train.Shards(list(enumerate(lengths)), lambda shard: (float(shard[0]) + at for at in range(shard[1])))
    run = train.start(workers.policy(folder, 3))
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(shards, global_batch_size=9)
    (Path(folder) / f"restored-{run.round}").write_text(str(run.steps))
    for _ in run.epochs(3):
        for x in loader:
            run.backward(model(x.float().unsqueeze(1)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if stop_after is not None and run.steps + 1 == stop_after:
                workers.wait_for_commit(folder, run.steps // 3 * 3)
                os._exit(9)
            run.commit()
    run.finish()


def audit(run_dir):
    """Return the audit of a run whose rounds have left a file each with the step they began after."""
    restored = {int(path.name[9:]): int(path.read_text()) for path in (run_dir.parent / "c").glob("restored-*")}
    lines, torn, _ = read_samples(run_dir / "samples")
    return audit_samples(lines, restored, torn_lines=torn)


class Streaming:
    """A dataset with the interface of ``datasets.IterableDataset``."""

    def __init__(self, shards):
        self.shards = shards
        self.num_shards = len(shards)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def shard(self, num_shards, index):
        assert num_shards == self.num_shards
        return Streaming.Part(self.shards[index])

    class Part:
        def __init__(self, samples):
            self.samples = samples

        def __iter__(self):
            return iter(self.samples)

        def skip(self, count):
            return Streaming.Part(self.samples[count:])


def evaluate(folder):
    """Measure a network with dropout and batch normalisation, whose buffers differ between the ranks."""
    run = train.start(workers.policy(folder))
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)))
    run.track(model=model)
    model.module[1].running_mean += run.rank
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(37, 4, generator=generator), torch.randint(0, 3, (37,), generator=generator)

    def measure(batch):
        outputs = model(batch[0])
        return {
            "loss": nn.functional.cross_entropy(outputs, batch[1], reduction="sum"),
            "correct": (outputs.argmax(1) == batch[1]).sum(),
        }

    found = run.evaluate(measure, TensorDataset(x, y), batch_size=4)
    run.finish()
    return {name: value.hex() for name, value in found.items()}


def evaluate_collectively(folder, length):
    """Measure with a collective in each forward pass."""
    run = train.start(workers.policy(folder))

    def measure(batch):
        dist.all_reduce(torch.zeros(1))
        return {"count": len(batch[0]), "sum": batch[0].sum()}

    found = run.evaluate(measure, TensorDataset(torch.arange(float(length))), batch_size=4)
    run.finish()
    return found


def forward_on_rank_0(folder):
    run = train.start(workers.policy(folder))
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    run.track(model=model)
    if run.is_main:
        with torch.no_grad():
            model(torch.randn(4, 4))
    run.finish()
    return "passed" if run.is_main else "waited"


def halved(_, bucket):
    """Return half of the gradients, as a communication hook of a script."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def reform_again_after_a_loss():
    """Replace the process group of a model; rank 1 is lost meanwhile, and rank 0 goes on alone."""
    dist.init_process_group("gloo")
    calls = []
    model = ElasticDataParallel(nn.Linear(4, 1), lambda _: False, lambda: False)
    model.eval()
    model.register_forward_hook(lambda *_: calls.append("called"))
    model.register_comm_hook(None, halved)
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        model.reform()
    except RuntimeError as error:
        failure = str(error)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model.reform()
    assert not model.training
    model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()
    return failure, calls, model.module.weight.grad.tolist()


def reform_many_times(times):
    """Replace the process group of a model right after each step, and drop the model after each tenth."""
    for each in range(times):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if each % 10 == 0:
            model = ElasticDataParallel(nn.Linear(4, 1), lambda _: False, lambda: False)
        else:
            model.reform()
        model(torch.ones(1, 4)).sum().backward()
        dist.destroy_process_group()
        if each % 10 == 9:
            del model
    return times


def open_after_a_failure():
    """Fail to open a group on rank 0, and return what both ranks add up after that."""
    identity = WorkerSettings.of(WorkerEnvironment.read()).identity
    if identity.rank == 0:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=1))
        assert not dist.is_initialized()
    open_group(identity, torch.device("cpu"))
    total = torch.ones(1)
    dist.all_reduce(total)
    close_group()
    return float(total)
