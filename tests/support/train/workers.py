"""Functions of the processes in the tests."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from azureml_elastic import train
from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.process import WorkerSettings
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, Fenced
from azureml_elastic.ipc import MessageClient
from azureml_elastic.train.agent_client.standalone import StandaloneAgent

torch.set_num_threads(1)


def dataset(length=50):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (length,), generator=generator)
    return TensorDataset(x, y)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def policy(folder, every_steps=None, keep=2):
    return CheckpointPolicy(path=str(folder), every=None, every_steps=every_steps, keep=keep)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def collect(_worker):
    gc.collect()


def forked_after_a_session(folder):
    """Fork data workers that collect what a session before has left behind; return what they read."""
    gc.disable()  # until then
    with train.start(policy(folder)) as run:
        run.track(model=run.wrap(network()))
    del run
    rows = DataLoader(range(4), num_workers=2, worker_init_fn=collect, multiprocessing_context="fork")
    return [row.item() for row in rows]


def gradients(folder, length, global_batch_size, drop_last):
    """Return the gradient of each step of an epoch, with the weights held still."""
    with train.start(policy(folder)) as run:
        model = run.wrap(network())
        run.track(model=model)
        loader = run.loader(dataset(length), global_batch_size=global_batch_size, drop_last=drop_last)
        found = []
        for x, y in loader:
            model.zero_grad()
            run.backward(nn.functional.cross_entropy(model(x), y))
            found.append(flat(parameter.grad for parameter in model.parameters()).tolist())
            run.commit()
        return found


def one_step(run, model, optimizer, x, y, scheduler=None):
    run.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    run.commit()


def train_steps(folder, epochs, *, stop_after=None, every_steps=None, length=50, global_batch_size=8, workers=0):
    """Train; end at a number of steps as if killed by SIGKILL. Return the loss curve and the weights."""
    run = train.start(policy(folder, every_steps))
    model = run.wrap(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = run.loader(dataset(length), global_batch_size=global_batch_size, num_workers=workers)
    first = run.steps
    for _ in run.epochs(epochs):
        for x, y in loader:
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if stop_after is not None and run.steps + 1 == stop_after:
                wait_for_commit(folder, run.steps // every_steps * every_steps)
                os._exit(9)
            scheduler.step()
            run.commit()
    run.finish()
    return {
        "first": first,
        "steps": run.steps,
        "weights": flat(model.parameters()).tolist(),
        "lr": scheduler.get_last_lr(),
    }


def wait_for_commit(folder, step):
    """Wait for a checkpoint, which is written beside training."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if json.loads((Path(folder) / "latest.json").read_text())["step"] >= step:
                return
        time.sleep(0.01)
    raise TimeoutError(f"no checkpoint of step {step}")


def train_each_saved(folder):
    """Train with a checkpoint every step, until the process dies."""
    return train_steps(folder, 10_000, every_steps=1)


def train_audited(folder, stop_after):
    """Train three epochs with a checkpoint every five steps, until the process dies."""
    return train_steps(folder, 3, stop_after=stop_after, every_steps=5)


class Stack:
    """Model, optimizer and all that a checkpoint holds, at a state that training has reached."""

    def __init__(self, *, sharded=False, trained=True):
        torch.manual_seed(1 if trained else 2)
        self.model = nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Linear(33, 3))
        if sharded:
            fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        if trained:
            for step in range(3):
                torch.manual_seed(10 * step + dist.get_rank())
                self.model(torch.randn(8, 6)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
        self.tracked = TrackedState({"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler})

    def content(self):
        """Return every tensor in full, and the rest, as plain data."""
        plain, tensors = self.tracked.collect(is_main=True)
        full = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            full[name] = whole.double().flatten().tolist()
        return json.loads(json.dumps({"plain": plain, "tensors": full}))


def _checkpoints(folder, keep=2):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    world = ProcessGroups(WorkerSettings.of(WorkerEnvironment.read()).identity, torch.device("cpu"))
    world.open()
    storage = LocalStorage(folder)
    agent = StandaloneAgent(storage, world.identity)
    return Checkpoints(policy(folder, keep=keep), storage, world, agent, stale_seconds=0.2)


def _save(checkpoints, step, tracked, data):
    checkpoints.begin(step, tracked, data, must_commit=True)
    outcome = checkpoints.settle()
    checkpoints.finish()
    checkpoints.require(at_once=True)
    return outcome.kind == "committed"


def save_stack(folder, sharded):
    checkpoints = _checkpoints(folder)
    stack = Stack(sharded=sharded)
    assert _save(checkpoints, 3, stack.tracked, {"epoch": 1})
    content = stack.content()
    dist.destroy_process_group()
    return content


def restore_stack(folder, sharded):
    checkpoints = _checkpoints(folder)
    stack = Stack(sharded=sharded, trained=False)
    restored = checkpoints.restore(stack.tracked)
    content = stack.content()
    dist.destroy_process_group()
    return restored.step, restored.data, content


def _damage(folder, kind):
    newest = folder / json.loads((folder / "latest.json").read_text())["directory"]
    manifest = newest / "manifest.json"
    if kind == "folder":
        shutil.rmtree(newest)
    elif kind == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        for path in (newest if kind == "shards" else folder).rglob("*.safetensors"):
            path.unlink()


DAMAGES = ["shards", "manifest", "folder"]
"""Of all others on one rank see ``tests/integration/checkpoint/test_damage.py``."""


def restore_damaged(folder):
    """Damage a run with the checkpoints 2 and 3 in several ways; return what each rank restored."""
    folder = Path(folder)
    rank = int(os.environ["RANK"])
    checkpoints = _checkpoints(folder / "good", keep=2)
    stack = Stack()
    for step in (1, 2, 3):
        stack.model.module[0].bias.data.fill_(step)
        assert _save(checkpoints, step, stack.tracked, {"step": step})
    found = {}
    for kind in [*DAMAGES, "all"]:
        if rank == 0:
            shutil.copytree(folder / "good", folder / kind)
            _damage(folder / kind, kind)
        dist.barrier()
        again = Stack(trained=False)
        try:
            restored = _checkpoints(folder / kind).restore(again.tracked)
            found[kind] = (restored.step, restored.data["step"], again.model.module[0].bias[0].item())
        except CheckpointDamaged as error:
            found[kind] = str(error)
    dist.destroy_process_group()
    return found


class FullDisk:
    """A tracked object whose state cannot be collected on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if int(os.environ["RANK"]) == self.rank:
            raise OSError(28, "No space left on device")
        return {}

    def load_state_dict(self, state_dict):
        pass


def failing_saves(folder):
    """Return the error of each rank when a rank cannot save because of its state or of the folder."""
    checkpoints = _checkpoints(folder)
    model = nn.Linear(2, 2)
    assert _save(checkpoints, 1, TrackedState({"model": model}), None)
    found = []
    for failing in range(dist.get_world_size()):
        try:
            _save(checkpoints, 2, TrackedState({"model": model, "disk": FullDisk(failing)}), None)
        except CheckpointError as error:
            found.append(str(error))
    if int(os.environ["RANK"]) == 0:
        Path(folder).rename(f"{folder}-gone")
        Path(folder).write_text("a file where the folder was")
    dist.barrier()
    try:
        _save(checkpoints, 3, TrackedState({"model": model}), None)
    except CheckpointError as error:
        found.append(str(error))
    dist.destroy_process_group()
    return found


def connect_fork_and_die(address, fifo):
    """Leave a child behind that lives until the other end of the fifo is closed."""
    client = MessageClient(address, lambda *_: None)
    client.send({"op": "here"})
    if os.fork() == 0:
        with open(fifo, "rb") as stream:  # noqa: PTH123
            stream.read()
        os._exit(0)
    client.flush(10)
    os._exit(9)


def agent_session(folder, steps, every_steps, hold_at=None, go=None):
    """Train under an agent for a number of steps, pausing after one of them for a file; return how it ended."""
    try:
        with train.start(policy(folder, every_steps)) as run:
            model = run.wrap(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run.track(model=model, optimizer=optimizer)
            loader = run.loader(dataset(50), global_batch_size=10)
            first = run.steps
            for _ in run.epochs(steps // 5):
                for x, y in loader:
                    one_step(run, model, optimizer, x, y)
                    time.sleep(0.002)
                    while run.steps == hold_at and not go.exists():
                        time.sleep(0.01)
    except Fenced as error:
        return f"fenced: {error}"
    return [first, run.steps]


def train_until(run, model, optimizer, until, scheduler=None):
    """Train up to a number of steps, over as many epochs as needed."""
    loader = run.loader(dataset(), global_batch_size=10)
    for _ in run.epochs(1_000):
        for x, y in loader:
            one_step(run, model, optimizer, x, y, scheduler)
            if run.steps == until:
                run.finish()
                return


def train_in_parts(folder, kind, until, every_steps=None):
    """Train up to a number of steps with the state spread in some way; return all weights."""
    run = train.start(policy(folder, every_steps))
    model, options = network(), {"lr": 0.01}
    if kind == "fsdp2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        model = run.wrap(model)
        make = torch.optim.AdamW
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, in every process

            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, **options)
        else:
            optimizer = make(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    train_until(run, model, optimizer, until, scheduler)
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return flat(weights).tolist()


def train_with_dropout(folder, until):
    """Train one process with dropout up to a number of steps; return the weights."""
    run = train.start(policy(folder))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    train_until(run, model, optimizer, until)
    return flat(model.parameters()).tolist()
