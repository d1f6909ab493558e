"""Random transformations that are the same at any world size: seeded by the micro-batch, not by the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from azureml_elastic.checkpoint.state import random_state

__all__ = ["SeededCollate", "SeededDataset", "SeededIds", "seeded"]


class SeededIds(list[int]):
    """Samples to fetch, and the name of their micro-batch.

    Args:
        ids: ids of the samples.
        place: position of the micro-batch.
    """

    def __init__(self, ids: Sequence[int] = (), place: tuple[int, ...] = ()) -> None:
        super().__init__(ids)
        self.place = place


class _Fetched(list[Any]):
    """Samples on their way to be a batch, within the random sequences of their micro-batch."""

    ending: contextlib.ExitStack


class SeededDataset:
    """A dataset whose random numbers depend on the micro-batch that is fetched.

    Args:
        dataset: map-style.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, ids: SeededIds) -> list[Any]:
        """Return the samples of a micro-batch; torch calls it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(seeded(*ids.place))
            many = getattr(self._dataset, "__getitems__", None)
            fetched = _Fetched(many(list(ids)) if many else [self._dataset[index] for index in ids])
            fetched.ending = stack.pop_all()
        return fetched


class SeededCollate:
    """The same for what makes a batch of samples, which torch calls next.

    Args:
        collate: collate function of the script.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: _Fetched) -> Any:
        """Return the batch."""
        with samples.ending:
            return self._collate(list(samples))


@contextlib.contextmanager
def seeded(*place: object, on: bool = True) -> Iterator[None]:
    """Begin random sequences of a place; the script's own go on afterwards, where they are this process's."""
    if not on:
        yield
    elif get_worker_info() is not None:
        random_state.begin("fetch", *place)
        yield
    else:
        with random_state.kept():
            random_state.begin("fetch", *place)
            yield
