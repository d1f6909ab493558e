"""Evaluation of a model on a dataset: each sample counts once, and the result is bit-identical at any world size.

The batches do not depend on the world size. They are divided among the ranks, and the sums over them are added
exactly (``math.fsum``). All ranks run the same number of forward passes, which may be collectives (FSDP2, ZeRO-3): a
rank with fewer batches repeats one, and drops its result. If the round ends meanwhile, the evaluation starts again in
the next one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.loader import require_foreign, to_device
from azureml_elastic.train.data.map_loader import SizedDataset
from azureml_elastic.train.data.sampling import share
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle


def evaluate(
    lifecycle: ProcessGroupLifecycle,
    modules: list[nn.Module],
    measure: Callable[[Any], Mapping[str, torch.Tensor | float]],
    dataset: SizedDataset,
    batch_size: int,
    options: Mapping[str, Any],
) -> dict[str, float]:
    """Return the means over all samples, with these modules in evaluation mode, see :meth:`Session.evaluate`."""
    count = len(dataset)
    if count < 1 or batch_size < 1:
        raise UsageError(f"The dataset has {count} samples and batch_size is {batch_size}; both must be 1 or more.")
    require_foreign(options)
    while True:
        generation = lifecycle.position.generation
        gathered: list[dict[str, list[float]]] = []
        with lifecycle.guard():
            for model in lifecycle.models:
                model.share_buffers()  # those of batch normalisation differ between ranks while they train
            with _evaluating(modules), torch.no_grad():
                own = _sums(lifecycle, measure, dataset, batch_size, options)
            # Ranks that compute the same samples, by tensor parallelism, have the same sums: one of them counts.
            gathered = lifecycle.world.control.gather(own if lifecycle.position.counts else {})
        if generation == lifecycle.position.generation:
            names = dict.fromkeys(name for sums in gathered for name in sums)
            return {name: math.fsum(each for sums in gathered for each in sums.get(name, ())) / count for name in names}


def _sums(
    lifecycle: ProcessGroupLifecycle,
    measure: Callable[[Any], Mapping[str, torch.Tensor | float]],
    dataset: Any,
    batch_size: int,
    options: Mapping[str, Any],
) -> dict[str, list[float]]:
    """Return the sums over each batch of this rank by name."""
    identity, count = lifecycle.position.identity, len(dataset)
    begins = range(0, count, batch_size)
    part = share(len(begins), identity.world_size, identity.rank)
    passes = len(share(len(begins), identity.world_size, 0))  # the largest share
    repeated = part.start if part else 0
    indices = [*part, *[repeated] * (passes - len(part))]
    batches = [list(range(begins[index], min(begins[index] + batch_size, count))) for index in indices]
    options = {"pin_memory": device_of(lifecycle.device).separate, **options}
    sums: dict[str, list[float]] = {}
    for index, batch in enumerate(DataLoader(dataset, batch_sampler=batches, **options)):
        measured = measure(to_device(batch, lifecycle.device))
        for name, value in measured.items() if index < len(part) else ():
            # Read batch by batch, which waits for the device: a sum there would depend on the batches of a rank.
            sums.setdefault(name, []).append(float(value))
    return sums


@contextlib.contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    modes = {part: part.training for module in modules for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
