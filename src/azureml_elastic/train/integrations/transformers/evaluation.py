"""Evaluations of ``Trainer`` whose results do not depend on the number of ranks.

transformers repeats samples until all ranks have as many, counts some of them in the loss, weighs the losses of a round
of batches by all ranks' labels, and multiplies them by the number of ranks. Here each batch is one of those of a single
process, has its own loss, and each sample counts once.

A random order may be another one in a process that has joined, as accelerate seeds it by torch's generator of the
process. So that of rank 0 is the order of all ranks: else samples would be left out, and others count twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from azureml_elastic.train.data.map_loader import loader_options
from azureml_elastic.train.integrations.nested import map_tensors
from azureml_elastic.train.integrations.wrapping import first_of

_LOG = logging.getLogger(__name__)

_LOADER = "_azureml_elastic_loader"
"""Attribute of a prepared loader with the one that takes its place; its workers may persist."""

_warned: set[str] = set()


@contextmanager
def evaluating(trainer: Any, prepared: Any, agree: Callable[[Any], Any]) -> Iterator[Any]:
    """Have an evaluation loop count each sample once; yield what it is to use in place of accelerate's loader.

    Args:
        agree: collective that returns rank 0's value
    """
    arguments = trainer.args
    across, gather = arguments.average_tokens_across_devices, trainer.gather_function
    arguments.average_tokens_across_devices = False  # a batch's loss is the mean over its own labels
    try:
        if _obstacle(trainer, prepared) is not None:
            yield prepared
            return
        loader = getattr(prepared, _LOADER, None)
        if loader is None:
            setattr(prepared, _LOADER, loader := EvaluationLoader(prepared, trainer.accelerator, agree))
        trainer.gather_function = loader.gather
        yield loader
    finally:
        arguments.average_tokens_across_devices, trainer.gather_function = across, gather


def _obstacle(trainer: Any, prepared: Any) -> str | None:
    """Return why accelerate divides the data, and log it once; ``None`` if it does not."""
    arguments = trainer.args
    sampler: Any = getattr(prepared, "batch_sampler", None)
    if arguments.world_size == 1:
        return "there is one rank"
    reasons: dict[str | None, bool] = {
        f"they come from {type(prepared).__name__} over {type(getattr(prepared, 'dataset', None)).__name__}": (
            not isinstance(prepared, DataLoader)
            or type(sampler).__name__ != "BatchSamplerShard"
            or sampler.split_batches
            or sampler.batch_size is None
        ),
        "eval_use_gather_object is set": arguments.eval_use_gather_object,
    }
    reason = first_of(reasons)
    if reason is not None and reason not in _warned and trainer.is_world_process_zero():
        _warned.add(reason)
        _LOG.warning(
            "transformers divides the data of an evaluation among the ranks: %s. Samples may count twice, so that its "
            "results depend on the number of nodes.",
            reason,
        )
    return reason


class EvaluationLoader:
    """Iterable over this rank's batches of an evaluation: batch ``i`` of a single process is rank ``i % world_size``'s.

    A rank that has none in the last round takes the first one again, and its results are dropped.

    Attributes:
        end_of_dataloader: whether the last batch was yielded
        remainder: number that accelerate would truncate by; it is not used
    """

    end_of_dataloader = False
    remainder = -1

    def __init__(self, prepared: DataLoader[Any], accelerator: Any, agree: Callable[[Any], Any]) -> None:
        self.dataset: Any = prepared.dataset
        shard: Any = prepared.batch_sampler
        self.batch_size = shard.batch_size
        self._state, self._gather = accelerator.gradient_state, accelerator.gather
        self._rounds = _Rounds(shard, agree)
        self._loader: DataLoader[Any] = DataLoader(self.dataset, batch_sampler=self._rounds, **loader_options(prepared))
        self._sizes: list[int] = []

    def __len__(self) -> int:
        """Return the number of batches of each rank."""
        return len(self._rounds)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches."""
        self.end_of_dataloader = False
        self._state._add_dataloader(self)  # noqa: SLF001 - compute_metrics asks it for the last batch
        try:
            for index, batch in enumerate(self._loader):
                self._sizes = self._rounds.sizes[index]
                self.end_of_dataloader = index == len(self._rounds.sizes) - 1
                yield batch
        finally:
            self._state._remove_dataloader(self)  # noqa: SLF001

    def gather(self, data: Any) -> Any:
        """Return the rows of all ranks' samples of the current round, in the order of the data. A collective."""
        return map_tensors(self._gathered, data)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:  # (rows, ...) of this rank -> (rows of all ranks, ...)
        if tensor.ndim == 0:
            tensor = tensor[None]
        if min(self._sizes) == self.batch_size:  # all but the last rounds
            return cast("torch.Tensor", self._gather(tensor.contiguous()))
        rows = len(tensor)
        # evaluation_loop repeats the loss of a batch, which is a mean, as often as the batch size that it was given.
        loss = tensor.ndim == 1 and tensor.is_floating_point() and rows == self.batch_size
        heights = self._gather(torch.tensor([rows], device=tensor.device)).tolist()  # (ranks,)
        padding = tensor.new_zeros((max(heights) - rows, *tensor.shape[1:]))
        gathered = self._gather(torch.cat([tensor, padding]))
        fetched = self._rounds.fetched(self._sizes)
        parts = torch.split(gathered, max(heights))
        kept = [
            # Outputs have a row for each sample, or several; a loss is repeated for a whole batch on all ranks.
            part[: size if loss else size * max(1, height // samples)]
            for part, height, size, samples in zip(parts, heights, self._sizes, fetched, strict=True)
        ]
        return torch.cat(kept)


class _Rounds:
    """Batch sampler of one rank's batches.

    Attributes:
        sizes: number of samples of each rank by round
    """

    def __init__(self, shard: Any, agree: Callable[[Any], Any]) -> None:
        self._shard = shard
        self._agree = agree
        self.sizes: list[list[int]] = []
        self._first = 0

    def __len__(self) -> int:
        return math.ceil(len(self._shard.batch_sampler) / int(self._shard.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        ranks, sampler = self._shard.num_processes, self._shard.batch_sampler
        batches = list(sampler)
        if type(sampler) is not BatchSampler or type(sampler.sampler) is not SequentialSampler:
            batches = self._agree(batches)
        rounds = [batches[begin : begin + ranks] for begin in range(0, len(batches), ranks)]
        self._first = len(batches[0]) if batches else 0
        self.sizes = [[*map(len, each), *[0] * (ranks - len(each))] for each in rounds]
        for each in rounds:
            yield (each + [batches[0]] * (ranks - len(each)))[self._shard.process_index]

    def fetched(self, sizes: list[int]) -> list[int]:
        """Return the number of samples that each rank has fetched in a round."""
        return [size or self._first for size in sizes]
