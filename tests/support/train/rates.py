"""Functions of the processes in the tests of learning rates and schedules."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as lrs

from azureml_elastic import train
from azureml_elastic.config import FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.position import Position
from azureml_elastic.train.optim.learning_rate import GradientNoiseScale, LearningRate
from azureml_elastic.train.step_state import StepMachine
from tests.support.train import workers

RATE, K = 0.01, 3


def _whole(tensors):
    return workers.flat(each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors)


def _make(kind, rate):
    model = workers.network()
    if kind == "fsdp2":
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    options = {"lr": rate, "momentum": 0.9}
    if kind != "zero":
        return model, torch.optim.SGD(model.parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, in every process
    return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, **options)


def _step(model, optimizer, number):
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def _scaled(optimizer, policy, world_size):
    rate = LearningRate(policy, Position(WorkerIdentity(0, 0, world_size, 0)), StepMachine())
    rate.attach([optimizer])
    rate.enter(world_size)
    return rate


def step_in_shards():
    """Return whether steps are those of the multiplied rate, the rate between them, and whether they are unscaled."""
    dist.init_process_group("gloo")
    found = {}
    for kind in ("zero", "fsdp2", "ddp"):
        weights = []
        for rate, world_size in [(RATE, K), (RATE * K, 1), (RATE, 1)]:
            model, optimizer = _make(kind, rate)
            _scaled(optimizer, FixedPerWorkerBatch(scaling="linear"), world_size)
            for number in range(3):
                _step(model, optimizer, number)
            if world_size == K:
                between = optimizer.param_groups[0]["lr"]
            weights.append(_whole(model.parameters()))
        found[kind] = [torch.equal(weights[0], weights[1]), between, torch.equal(weights[0], weights[2])]
    dist.destroy_process_group()
    return found


def rescale_in_shards():
    """Return whether a step without gradients moves the weights as before, after the factor has risen."""
    dist.init_process_group("gloo")
    found = {}
    for kind in ("zero", "fsdp2", "ddp"):
        moved = []
        for world_size in (1, 4):
            model, optimizer = _make(kind, RATE)
            rate = _scaled(optimizer, FixedPerWorkerBatch(scaling="linear", momentum="rescale"), 1)
            _step(model, optimizer, 0)
            before = _whole(model.parameters())
            rate.enter(world_size)
            for parameter in model.parameters():
                parameter.grad.zero_()
            optimizer.step()
            moved.append(_whole(model.parameters()) - before)
        found[kind] = torch.equal(*moved) and moved[0].norm().item() > 0
    dist.destroy_process_group()
    return found


def refused_in_shards(folder, batch):
    """Return the error where the model is sharded."""
    run = train.start(workers.policy(folder), batch=batch)
    model, optimizer = _make("fsdp2", RATE)
    try:
        run.track(model=model, optimizer=optimizer)
    except UsageError as error:
        return str(error)
    return None


def fit(folder, until, batch):
    """Train up to a number of steps; return the factor of each, the rates in and between them, and the weights."""
    run = train.start(workers.policy(folder), batch=batch)
    model = run.wrap(workers.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    applied, factors, between = [], [], set()
    optimizer.register_step_pre_hook(lambda *_: applied.append(optimizer.param_groups[0]["lr"]))
    loader = run.loader(workers.dataset(120), global_batch_size=10)
    for _ in run.epochs(1_000):
        for x, y in loader:
            factors.append(run.learning_rate_factor)
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            between.add(optimizer.param_groups[0]["lr"])
            run.commit()
            if run.steps == until:
                run.finish()
                weights = workers.flat(model.parameters()).tolist()
                return {"applied": applied, "factors": factors, "between": between, "weights": weights}
    raise AssertionError


def measure(folder, batch):
    """Train four steps of uneven micro-batches; return the gain of each, measured and computed directly."""
    run = train.start(workers.policy(folder), batch=batch)
    model = run.wrap(workers.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    applied, gains, expected, noise, parts = [], [], [], GradientNoiseScale(), []
    optimizer.register_step_pre_hook(lambda *_: applied.append(optimizer.param_groups[0]["lr"]))
    for x, _ in run.loader(workers.dataset(80), global_batch_size=10, micro_batch_size=4):
        own = workers.network()
        own.load_state_dict(model.module.state_dict())
        (own(x) - 1).square().mean().backward()
        parts.append((len(x), workers.flat(each.grad for each in own.parameters())))
        run.backward((model(x) - 1).square().mean())
        if run.accumulating:
            continue
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, parts)
        everything = [part for each in gathered for part in each]
        count = sum(size for size, _ in everything)
        mean = sum(size / count * gradient for size, gradient in everything)
        local = sum(size / count * gradient.square().sum().item() for size, gradient in everything)
        noise = noise.observe(
            local, mean.square().sum().item(), micro_batches=len(everything), count=count, reference=10
        )
        expected.append(noise.gain(1, dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
        gains.append(run.learning_rate_factor)
        parts = []
        run.commit()
    run.finish()
    return {"gains": gains, "expected": expected, "applied": applied}


SCHEDULERS = {
    "cosine": lrs.CosineAnnealingLR,
    "step": lambda optimizer, steps: lrs.StepLR(optimizer, 3, gamma=0.5),
    "one cycle": lambda optimizer, steps: lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
    "warm-up": lambda optimizer, steps: lrs.SequentialLR(
        optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=4), lrs.CosineAnnealingLR(optimizer, steps)], [4]
    ),
}


def curve(name, steps):
    """Return the rate of each step of a run in plain torch, and the one after the last."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=RATE, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer, steps)
    found = scheduler.get_last_lr()
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found += scheduler.get_last_lr()
    return found


def follow(folder, batch, length, global_batch_size, epochs, stop=None, **options):
    """Train with a schedule of each kind; return the rates of each step by its epoch."""
    run = train.start(workers.policy(folder), batch=batch)
    torch.manual_seed(0)
    model = run.wrap(nn.ModuleDict({name: nn.Linear(6, 3) for name in SCHEDULERS}).double())
    optimizers = {name: torch.optim.SGD(model.module[name].parameters(), lr=RATE, momentum=0.9) for name in SCHEDULERS}
    steps = epochs * -(-length // global_batch_size)
    schedules = {name: run.schedule(make(optimizers[name], steps)) for name, make in SCHEDULERS.items()}
    run.track(
        model=model,
        **{f"optimizer {name}": each for name, each in optimizers.items()},
        **{f"schedule {name}": each for name, each in schedules.items()},
    )
    loader = run.loader(workers.dataset(length), global_batch_size=global_batch_size, **options)
    found = []
    for epoch in run.epochs(epochs):
        for x, y in loader:
            losses = [nn.functional.cross_entropy(part(x), y) for part in model.module.values()]
            run.backward(sum(losses))
            found.append((epoch, {name: each.param_groups[0]["lr"] for name, each in optimizers.items()}))
            for name in SCHEDULERS:
                optimizers[name].step()
                schedules[name].step()
            run.commit()
            if run.steps == stop:
                run.finish()
                return found, None
    run.finish()
    return found, {name: each.get_last_lr()[0] for name, each in schedules.items()}


def follow_accelerated(folder, batch):
    """Train with the optimizer and scheduler wrapped by Accelerate; return the rate of each step."""
    import accelerate

    run = train.start(workers.policy(folder), batch=batch)
    model = run.wrap(workers.network())
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    scheduler = run.schedule(accelerator.prepare(lrs.ExponentialLR(optimizer.optimizer, 0.5)))
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    found = []
    for x, y in run.loader(workers.dataset(60), global_batch_size=10):
        run.backward(nn.functional.cross_entropy(model(x), y))
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.commit()
    run.finish()
    return found
