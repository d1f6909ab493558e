"""Functions of the processes in the tests of gradients and exact sums."""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, TensorDataset

from azureml_elastic import train
from tests.support.train import workers

FEATURES, CLASSES = 12, 5


def data(length):
    """Classes of very different frequency, so that means of means are far from means."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, FEATURES, generator=generator)
    return TensorDataset(
        x * torch.arange(1, length + 1).unsqueeze(1) / length, torch.randint(0, CLASSES, (length,), generator=generator)
    )


def network(normalised=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(16), nn.Dropout(0.2)] if normalised else []
    return nn.Sequential(nn.Linear(FEATURES, 16), *middle, nn.ReLU(), nn.Linear(16, CLASSES))


def flat(model):
    found = [parameter.grad for parameter in model.parameters()]
    found = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    return torch.cat([each.flatten() for each in found]).tolist()


def noise(folder, length, global_batch_size, policy, options, hooked=False):
    """Return AdaScale's estimates after the first step, and the calls of a communication hook of the script's own."""
    run = train.start(workers.policy(folder), batch=policy)
    model = run.wrap(network())
    run.track(model=model)
    calls = []
    if hooked:
        model.register_comm_hook(None, lambda _, bucket: calls.append(1) or allreduce_hook(dist.group.WORLD, bucket))
    for x, y in run.loader(data(length), global_batch_size=global_batch_size, **options):
        run.backward(nn.functional.cross_entropy(model(x), y))
        if not run.accumulating:
            break
    return run._run.rate._scale.noise.moments, run.learning_rate_factor, len(calls)


def of_each_step(folder, length, global_batch_size, policy, options=None, weighted=True, sharded=False):
    """Return the gradient of each step of an epoch, with the weights held still."""
    run = train.start(workers.policy(folder), batch=policy)
    model = fully_shard(network()) if sharded else run.wrap(network())
    run.track(model=model)

    def backward(loss, y):
        if weighted:
            run.backward(loss)
        else:
            loss.backward()

    return _of_steps(
        run, model, run.loader(data(length), global_batch_size=global_batch_size, **(options or {})), backward
    )


def _of_steps(run, model, loader, backward):
    found = []
    for x, y in loader:
        backward(nn.functional.cross_entropy(model(x), y), y)
        if run.accumulating:
            continue
        found.append(flat(model))
        model.zero_grad()
        run.commit()
    run.finish()
    return found


class Sentences(Dataset):
    """Samples of 1 to 7 tokens."""

    def __init__(self, length):
        self.x, _ = data(length * 7).tensors
        self.y = data(length * 7).tensors[1]
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        tokens = range(index * 7, index * 7 + 1 + index % 7)
        return self.x[list(tokens)], self.y[list(tokens)]


def pad(samples):
    return torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])


def of_tokens(folder, length, global_batch_size, policy, options=None):
    """The same, with a loss that is the mean over tokens."""
    run = train.start(workers.policy(folder), batch=policy)
    model = run.wrap(network())
    run.track(model=model)
    loader = run.loader(Sentences(length), global_batch_size=global_batch_size, collate_fn=pad, **(options or {}))
    return _of_steps(run, model, loader, lambda loss, y: run.backward(loss, count=len(y)))


class Noisy(Dataset):
    """Samples with noise that is drawn when they are read."""

    def __init__(self, length):
        self._samples = data(length)

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        x, y = self._samples[index]
        return x + 0.1 * torch.randn(FEATURES), y


def train_exactly(folder, epochs, policy, stop_after=None, every_steps=4, processes=0):
    """Train a network with every kind of randomness; end at a number of steps as if killed by SIGKILL."""
    run = train.start(workers.policy(folder, every_steps), batch=policy)
    model = run.wrap(network(normalised=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(Noisy(120), global_batch_size=48, num_workers=processes)
    first = run.steps
    for _ in run.epochs(epochs):
        for x, y in loader:
            run.backward(nn.functional.cross_entropy(model(x), y))
            if run.accumulating:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if stop_after is not None and run.steps + 1 == stop_after:
                workers.wait_for_commit(folder, run.steps // every_steps * every_steps)
                os._exit(9)
            run.commit()
    run.finish()
    state = [*model.state_dict().values(), *(each["momentum_buffer"] for each in optimizer.state.values())]
    return {"first": first, "steps": run.steps, "hash": digest(state)}


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
