"""Elastic loaders, by the kind of dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.loader import ElasticLoader, LoaderContext
from azureml_elastic.train.data.map_loader import MapLoader, SizedDataset
from azureml_elastic.train.data.sampling import DataSpec
from azureml_elastic.train.data.shard_loader import ShardedDataset, ShardLoader, ShardSpec

__all__ = ["DataOrder", "make_loader"]


@dataclass(frozen=True)
class DataOrder:
    """What must stay the same over all restarts; for the fields see :meth:`Session.loader`."""

    name: str
    global_batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool


def make_loader(
    dataset: SizedDataset | ShardedDataset,
    order: DataOrder,
    context: LoaderContext,
    exchange: Callable[[torch.Tensor], None],
) -> ElasticLoader:
    """Return a loader from the position in the data, see :meth:`Session.loader`.

    Args:
        dataset: map-style dataset, or one in shards
        context: settings beside the data
        exchange: collective that adds a vector over all ranks, in place

    Raises:
        UsageError: the name is taken, the data differ from those of the checkpoint, or the dataset has neither a
            length nor shards.
    """
    batching, position = context.batching, context.position
    batching.require_fitting(order.global_batch_size)
    if batching.exact and position.loaders:
        raise UsageError('reduce="exact" works with one training loader; take reduce="allreduce" for several.')
    fields: dict[str, Any] = {
        "global_batch_size": order.global_batch_size,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "drop_last": order.drop_last,
    }
    if not isinstance(dataset, IterableDataset) and isinstance(dataset, SizedDataset):
        spec = DataSpec(len(dataset), **fields)
        return MapLoader(dataset, position.add(order.name, spec), context)
    if not isinstance(dataset, ShardedDataset):
        raise UsageError(
            f"{type(dataset).__name__} has neither a length and samples by index, nor num_shards and shard(), so "
            "it cannot be divided among ranks. Wrap its items: train.Shards(paths, read_one)."
        )
    if batching.micro_batch_size is not None or batching.micro_batches is not None:
        raise UsageError(
            "micro_batch_size and micro_batches do not go with shards; give the policy logical_workers for smaller "
            "batches."
        )
    smallest = batching.window_size(order.global_batch_size, 1)
    shards = ShardSpec.make(dataset.num_shards, batching.logical_workers, smallest_window=smallest, **fields)
    return ShardLoader(dataset, position.add(order.name, shards), context, exchange)
