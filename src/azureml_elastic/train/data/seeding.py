"""Random transformations that are the same at any world size: seeded by the micro-batch, not by the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from azureml_elastic.checkpoint.state import random_state

__all__ = ["SeededCollate", "SeededDataset", "SeededIds", "seeded"]


class SeededIds(list[int]):
    """Ids of the samples of a micro-batch, with the seed of its random numbers."""

    def __init__(self, ids: Sequence[int] = (), seed: tuple[int, ...] = ()) -> None:
        super().__init__(ids)
        self.seed = seed


class _Samples(list[Any]):
    """Samples of a micro-batch whose random sequences are active until they are collated."""

    ending: contextlib.ExitStack


@dataclass(eq=False)
class SeededDataset:
    """A map-style dataset whose random numbers depend on the micro-batch that is fetched."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: SeededIds) -> list[Any]:
        """Return the samples of a micro-batch; called by torch."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(seeded(*ids.seed))
            many = getattr(self.dataset, "__getitems__", None)
            fetched = _Samples(many(list(ids)) if many else [self.dataset[index] for index in ids])
            fetched.ending = stack.pop_all()
        return fetched


@dataclass(eq=False)
class SeededCollate:
    """A collate function that continues the random sequences of :class:`SeededDataset`."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: _Samples) -> Any:
        """Return the batch."""
        with samples.ending:
            return self.collate(list(samples))


@contextlib.contextmanager
def seeded(*seed: object) -> Iterator[None]:
    """Begin random sequences with a seed; outside of a data loader's process, restore the script's own afterwards."""
    with random_state.kept() if get_worker_info() is None else contextlib.nullcontext():
        random_state.begin("fetch", *seed)
        yield
