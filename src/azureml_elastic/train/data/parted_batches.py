"""Batches with more samples than the script's, which are collated once more in parts of the script's size.

With fewer ranks than at full size a rank takes several shares of a step. What a share alone would hold cannot always be
cut from the batch of all: its padding is that of its own longest sample, and a graph numbers its nodes. So the samples,
which are fetched once, are collated together and in parts, by the process that has them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from azureml_elastic.checkpoint.state import random_state

__all__ = ["PartedBatch", "PartedCollate", "copied_samples", "edges_of_parts"]

Collate = Callable[[list[Any]], Any]


def edges_of_parts(count: int, limit: int) -> list[int]:
    """Return where nearly equal parts of at most ``limit`` samples begin and end."""
    number = -(-count // limit)
    return [count * index // number for index in range(number + 1)]


class PartedBatch(NamedTuple):
    """A collated batch, and its parts as they are collated by themselves; a tuple, so that torch pins its memory."""

    whole: Any
    parts: list[Any] | None


@dataclass
class PartedCollate:
    """Collates samples as the script does, and on request in parts as well.

    Args:
        limit: samples of a part; ``None`` to collate no parts
        fits: returns whether parts, whose edges it is given, hold the same as the whole
    """

    collate: Collate
    limit: int | None = None
    fits: Callable[[Any, Sequence[Any], Sequence[int]], bool] | None = None

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch as the script would have it, a :class:`PartedBatch` where it has several parts."""
        if self.limit is None or self.fits is None or len(samples) <= self.limit:
            return self.collate(samples)
        copies = copied_samples(samples)
        whole = self.collate(samples)
        edges = edges_of_parts(len(samples), self.limit)
        try:
            # The random numbers of the script are those that it has without parts.
            with random_state.kept():
                parts = [self.collate(copies[start:stop]) for start, stop in itertools.pairwise(edges)]
            return PartedBatch(whole, parts if self.fits(whole, parts, edges) else None)
        except Exception:  # noqa: BLE001 - of any code of the script's, which the batch itself does not need
            return PartedBatch(whole, None)


def copied_samples(samples: Sequence[Any]) -> list[Any]:
    """Return samples that may be collated once more: functions that do it take keys out of them."""
    return [each if isinstance(each, (torch.Tensor, tuple)) else copy.copy(each) for each in samples]
