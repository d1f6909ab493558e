"""Measuring a model on a data set: each sample once, by whichever ranks there are, with the same result to the bit.

The batches do not depend on the world size; they are dealt out to the ranks, and the sums over them are added up
exactly (``math.fsum``). Where the round ends in the middle, the measurement begins anew with the ranks of the next one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.loader import SizedDataset, require_foreign, to_device
from azureml_elastic.train.data.sampling import share
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle

__all__ = ["Evaluation"]

Sums = Mapping[str, "torch.Tensor | float"]


class Evaluation:
    """One data set and what is measured on it.

    Args:
        measure: takes a batch and returns sums over its samples by name.
        dataset: map-style, the same on all ranks.
        batch_size: samples of a batch.
        options: of ``DataLoader``.

    Raises:
        UsageError: the data set is empty, or an option is one that is set here.
    """

    def __init__(
        self, measure: Callable[[Any], Sums], dataset: SizedDataset, batch_size: int, options: Mapping[str, Any]
    ) -> None:
        if len(dataset) < 1 or batch_size < 1:
            raise UsageError(
                f"The data set has {len(dataset)} samples and batch_size is {batch_size}; both must be 1 or more."
            )
        require_foreign(options)
        self._measure = measure
        self._dataset = dataset
        self._batch_size = batch_size
        self._options = options

    def run(self, lifecycle: ProcessGroupLifecycle, modules: list[nn.Module]) -> dict[str, float]:
        """Return the means over all samples, the same on all ranks. A collective.

        Args:
            lifecycle: of this process in the run.
            modules: to be in evaluation mode meanwhile.
        """
        while True:
            generation = lifecycle.position.generation
            gathered: list[dict[str, list[float]]] = []
            with lifecycle.guard():
                lifecycle.share_buffers()
                with _evaluating(modules), torch.no_grad():
                    own = self._sums(lifecycle)
                gathered = lifecycle.world.control.gather(own)
            if generation == lifecycle.position.generation:
                return self._means(gathered)

    def _sums(self, lifecycle: ProcessGroupLifecycle) -> dict[str, list[float]]:
        identity, count = lifecycle.position.identity, len(self._dataset)
        begins = range(0, count, self._batch_size)
        part = share(len(begins), identity.world_size, identity.rank)
        mine = [list(range(begin, min(begin + self._batch_size, count))) for begin in begins[part.start : part.stop]]
        options = {"pin_memory": lifecycle.device.type == "cuda", **self._options}
        loader: DataLoader[Any] = DataLoader(
            self._dataset,  # type: ignore[arg-type]  # torch asks for its class, and uses the two methods
            batch_sampler=mine,
            **options,
        )
        sums: dict[str, list[float]] = {}
        for batch in loader if mine else ():
            for name, value in self._measure(to_device(batch, lifecycle.device)).items():
                sums.setdefault(name, []).append(float(value))
        return sums

    def _means(self, gathered: list[dict[str, list[float]]]) -> dict[str, float]:
        names = dict.fromkeys(name for sums in gathered for name in sums)
        count = len(self._dataset)
        return {name: math.fsum(each for sums in gathered for each in sums.get(name, ())) / count for name in names}


@contextlib.contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    parts = [part for module in modules for part in module.modules()]
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
