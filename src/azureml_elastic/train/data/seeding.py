"""Random transformations that are the same at any world size: seeded by the micro-batch, not by the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from azureml_elastic.checkpoint.state import random_state

__all__ = ["SeededDataset", "SeededIds", "seeded"]


class SeededIds(list[int]):
    """Ids of the samples of a micro-batch, with the seed of its random numbers."""

    def __init__(self, ids: Sequence[int] = (), seed: tuple[int, ...] = ()) -> None:
        super().__init__(ids)
        self.seed = seed


@dataclass(eq=False)
class SeededDataset:
    """A map-style dataset whose random numbers depend on the micro-batch that is fetched.

    Its sequences go on where the samples are collated. The script's own are not restored afterwards: those of the
    training process begin anew before each micro-batch is trained.
    """

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: SeededIds) -> list[Any]:
        """Return the samples of a micro-batch; called by torch."""
        begin(*ids.seed)
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(ids)) if many else [self.dataset[index] for index in ids])


def begin(*seed: object) -> None:
    """Begin the random sequences of a micro-batch's samples."""
    random_state.begin("fetch", *seed)


@contextlib.contextmanager
def seeded(*seed: object) -> Iterator[None]:
    """Begin random sequences with a seed; outside of a data loader's process, restore the script's own afterwards."""
    with random_state.kept() if get_worker_info() is None else contextlib.nullcontext():
        begin(*seed)
        yield
