"""What a stack's trainer trains: the data, order and batches of the loader that its loop would iterate over.

The loader is what a hook such as ``get_train_dataloader`` returns, of whatever class: accelerate's around that of the
script, or one that nothing divides among the ranks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from azureml_elastic.train.data.drawn_order import DrawnOrder
from azureml_elastic.train.data.map_loader import WindowLoader, loader_options
from azureml_elastic.train.session.stack_session import StackSession


@dataclass(frozen=True)
class Source:
    """The training data.

    Args:
        batch_size: samples of a batch of one rank
        drop_last: whether a last batch that is smaller is left out
        sampler: sampler or batch sampler whose order is trained; ``None`` for that of a seed, or of the data
        shuffle: whether the order is random, without a sampler
        whole_batches: whether the sampler is a batch sampler, whose batches belong together
        divided: whether the script or accelerate has the data divided among the ranks
        seed: the sampler's own seed of its random order, if it has one
    """

    dataset: Any
    batch_size: int
    drop_last: bool
    sampler: Any = None
    shuffle: bool = False
    whole_batches: bool = False
    divided: bool = True
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of samples of an epoch, or of batches that belong together."""
        return len(self.dataset if self.sampler is None else self.sampler)

    def seed_of(self, loader: Any) -> int:
        """Return the seed of the random order of a loader of it."""
        generator = getattr(getattr(loader.batch_sampler, "sampler", None), "generator", None)
        return self.seed or (0 if generator is None else int(generator.initial_seed()))

    def drawn(self, seed: int, agree: Callable[[Any], Any]) -> DrawnOrder | None:
        """Return the order of the sampler, if it has one, by a collective that returns rank 0's value."""
        if self.sampler is None:
            return None
        return DrawnOrder(self.sampler, whole_batches=self.whole_batches, seed=seed, agree=agree)

    def windows(self, session: StackSession, **options: Any) -> WindowLoader:
        """Return a loader of windows over the data, see :meth:`StackSession.windows`."""
        own = {"shuffle": self.shuffle, "drop_last": self.drop_last, **self.options}
        return session.windows(self.dataset, **{**own, **options})


def obstacle(loader: Any) -> str | None:
    """Return why the data of a loader cannot be divided by their index, ``None`` if they can."""
    if not isinstance(loader, DataLoader):
        return f"the loader is a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return f"the samples of {type(loader.dataset).__name__} have no index"
    sampler, _ = _batch_sampler(loader)
    if sampler is None:
        return f"the loader of {type(loader.dataset).__name__} has neither batches nor a batch sampler"
    if not hasattr(sampler, "__len__"):
        return f"{type(sampler).__name__} has no length"
    if type(sampler).__name__ == "BatchRebalanceSampler":
        return "BatchRebalanceSampler balances the batches of the ranks that there are"
    inner = getattr(sampler, "sampler", None)
    if _is_plain(sampler, "BatchSampler") and not hasattr(inner, "__len__"):
        return f"{type(inner).__name__} has no length"
    for each in (sampler, inner):
        if type(each) is not DistributedSampler and hasattr(each, "num_replicas") and hasattr(each, "rank"):
            return f"{type(each).__name__} divides them by itself"
    return None


def source_of(loader: DataLoader[Any], ranks: int) -> Source:
    """Return the training data of a loader that has no obstacle.

    Args:
        ranks: number of ranks of a run with all nodes
    """
    sampler, shard = _batch_sampler(loader)
    split = shard is not None and shard.split_batches  # then its batch size is that of all ranks
    prepared = type(loader).__module__.partition(".")[0] == "accelerate"
    dataset: Any = loader.dataset
    common: dict[str, Any] = {"dataset": dataset, "options": loader_options(loader), "divided": prepared}
    if not _is_plain(sampler, "BatchSampler"):
        return Source(batch_size=1, drop_last=False, sampler=sampler, whole_batches=True, **common)
    inner: Any = sampler.sampler
    common |= {
        "batch_size": max(1, sampler.batch_size // ranks) if split else sampler.batch_size,
        "drop_last": sampler.drop_last,
    }
    if isinstance(inner, DistributedSampler):
        return Source(shuffle=inner.shuffle, seed=inner.seed, **{**common, "divided": True})
    if type(inner) is SequentialSampler:
        return Source(**common)
    # accelerate takes its SeedableRandomSampler in place of torch's.
    random = _is_plain(inner, "RandomSampler") or type(inner).__name__ == "SeedableRandomSampler"
    if random and not inner.replacement and inner.num_samples == len(dataset):
        return Source(shuffle=True, **common)
    return Source(sampler=inner, **common)


def _is_plain(sampler: Any, name: str) -> bool:
    """Return whether a sampler is torch's own of this name, or that of torchdata's ``StatefulDataLoader``."""
    return type(sampler).__name__ == name and type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")


def _batch_sampler(loader: DataLoader[Any]) -> tuple[Any, Any]:
    """Return a loader's batch sampler, and what accelerate has put around it."""
    sampler: Any = loader.batch_sampler
    if sampler is None and not isinstance(loader.sampler, SequentialSampler | RandomSampler):
        sampler = loader.sampler  # DataLoader(sampler=BatchSampler(...), batch_size=None)
        sampler = sampler if isinstance(sampler, BatchSampler) else None
    if type(sampler).__name__ == "BatchSamplerShard":
        return sampler.batch_sampler, sampler
    return sampler, None


def calls_its_own(trainer: Any, name: str) -> str | None:
    """Return the class that replaces a method of ``Trainer`` without calling it; ``None`` if all of them call it."""
    for kind in type(trainer).__mro__:
        if kind.__module__ == "transformers.trainer" and kind.__name__ == "Trainer":
            return None
        method = vars(kind).get(name)
        if method is not None and name not in set(_names(method)):
            return kind.__name__
    return None


def _names(function: Any) -> Iterator[str]:
    """Yield the names that a function's code reads, and that of the functions within it."""
    code = function if isinstance(function, types.CodeType) else _code(function)
    if code is not None:
        yield from code.co_names
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                yield from _names(each)


def _code(function: Callable[..., Any]) -> types.CodeType | None:
    while hasattr(function, "__wrapped__"):  # a decorator's function
        function = function.__wrapped__
    while isinstance(function, functools.partial | functools.partialmethod):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", None)
