"""Runs a script and writes down what it trains, by the hooks of torch alone.

Each optimizer step of a process is a line: which of the script's optimizers, its number, the learning rate, the norm of
the weights after it, and the samples whose gradients it has applied. A number counts all steps of an optimizer's state,
which keeps it in a parameter group, so that lines of several processes are those of one training. A sample belongs to a
step if a model has computed its batch and a loss has gone backward since: batches that are fetched ahead, looked at,
evaluated or counted again do not. The script knows nothing of it, and neither does what recovers it.
"""

import argparse
import json
import os
import runpy
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DistributedSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--script", type=Path, required=True)
parser.add_argument("--full", type=int, default=0, help="go slowly while there are fewer ranks")
parser.add_argument("--pause", type=float, default=0.03, help="seconds after each step")
observed, rest = parser.parse_known_args()

COUNT = "observed"
fetched = deque(maxlen=64)  # the inputs of batches, all of their tensors, and their samples
computed, trained = [], {}
optimizers = []
now = {"pause": observed.pause, "epoch": None, "passes": 0, "depth": 0}


def tensors(value):
    """Yield the tensors of a batch, or of a call's arguments, in whatever they are nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif not isinstance(value, (str, bytes)) and hasattr(value, "__iter__") and hasattr(value, "__getitem__"):
        for each in value:  # graphs yield pairs of name and tensor
            yield from tensors(each)


def known_by(batch):
    """Return the tensors by which a batch is known: its first one, or all of its first list, as of images."""
    first = batch[0] if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], (list, tuple)) else batch
    return list(tensors(first))[: None if first is not batch else 1]


def same(inputs, given):
    """Return whether a model was given this batch. One without tensors is prepared by the trainer."""
    return bool(inputs) and all(any(equal(one, other) for other in given) for one in inputs)


def newest_given(given):
    """Return the samples of the batches that a model was given.

    Of several with the same inputs, as of pairs with the same first texts, it is the one of which it was given most.
    """
    found = []
    for inputs, whole, ids in reversed(fetched):
        if same(inputs, given):
            number = sum(any(equal(one, other) for other in given) for one in whole)
            alike = next((each for each in found if same(each[0], inputs) and same(inputs, each[0])), None)
            if alike is None:
                found.append([inputs, number, ids])
            elif number > alike[1]:
                alike[1:] = number, ids
    return [ids for _, _, ids in reversed(found)]


def equal(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def fetch(self, ids, _fetch=_MapDatasetFetcher.fetch):
    """Note which samples a batch has."""
    batch = _fetch(self, ids)
    fetched.append((known_by(batch), list(tensors(batch)), list(map(int, ids))))
    if not now["depth"]:  # the first forward pass of a process fetches its batch once more
        computed.clear()
    return batch


def call(self, *args, _call=nn.Module.__call__, **kwargs):
    """Note the batches that a model computes with gradients: known by what they hold, as stacks copy them."""
    if torch.is_grad_enabled() and not now["depth"]:
        computed.extend(newest_given(list(tensors((args, kwargs)))))
    now["depth"] += 1
    try:
        return _call(self, *args, **kwargs)
    finally:
        now["depth"] -= 1


def backward(self, *args, _backward=torch.Tensor.backward, **kwargs):
    """Take the samples for trained; those of the newest batch, if no model was given it as it is."""
    for ids in computed or [ids for *_, ids in list(fetched)[-1:]]:
        trained.update(dict.fromkeys(ids))
    now["passes"] += 1
    result = _backward(self, *args, **kwargs)
    computed.clear()  # parts of a batch are computed once more
    return result


def add_param_group(self, group, _add=Optimizer.add_param_group):
    group.setdefault(COUNT, 0)
    if self not in optimizers:
        optimizers.append(self)
    return _add(self, group)


def set_epoch(self, epoch, _set=DistributedSampler.set_epoch):
    now["epoch"] = epoch
    return _set(self, epoch)


def stepped(optimizer, args, kwargs):
    """Write down a step, which others may follow slowly. Nothing is trained where no loss has gone backward."""
    if not now["passes"]:
        return
    first = optimizer.param_groups[0]
    first[COUNT] += 1
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    norms = [each.detach().norm() for group in optimizer.param_groups for each in group["params"]]
    line = {
        "optimizer": optimizers.index(optimizer),
        "step": first[COUNT],
        "ranks": ranks,
        "rate": first["lr"],
        "weights": float(torch.stack(norms).norm()),
        "samples": list(trained),
        "epoch": now["epoch"],
        "passes": now["passes"],
    }
    trained.clear()
    now["passes"] = 0
    with (observed.folder / f"observed.{os.getpid()}").open("a") as file:
        file.write(json.dumps(line) + "\n")
    if observed.full and dist.is_initialized():
        now["pause"] = observed.pause if ranks == observed.full else min(1.0, now["pause"] * 1.3)
        time.sleep(now["pause"])


_MapDatasetFetcher.fetch = fetch
nn.Module.__call__ = call
torch.Tensor.backward = backward
Optimizer.add_param_group = add_param_group
DistributedSampler.set_epoch = set_epoch
register_optimizer_step_post_hook(stepped)
sys.argv = [str(observed.script), "--output_dir", str(observed.folder), *rest]
sys.path[0] = str(observed.script.parent)
runpy.run_path(str(observed.script), run_name="__main__")
