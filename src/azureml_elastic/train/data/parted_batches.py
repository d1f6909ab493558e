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
from typing import Any, NamedTuple, Protocol

from azureml_elastic.checkpoint.state import random_state

Collate = Callable[[list[Any]], Any]


def edges_of_parts(count: int, limit: int) -> list[int]:
    """Return where nearly equal parts of at most ``limit`` samples begin and end."""
    number = -(-count // limit)
    return [count * index // number for index in range(number + 1)]


class PartedBatch(NamedTuple):
    """A collated batch, and its parts as they are collated by themselves; a tuple, so that torch pins its memory."""

    whole: Any
    parts: list[Any]


class PartsLayout(Protocol):
    """What is known of the parts of batches."""

    def needs_parts(self, whole: Any) -> bool:
        """Return whether parts that are collated alone may be others than those that are cut from a batch."""

    def fits(self, whole: Any, parts: Sequence[Any], edges: Sequence[int]) -> bool:
        """Return whether such parts, which begin at the edges, hold the same as the batch."""


@dataclass
class PartedCollate:
    """Collates samples as the script does, and on request in parts as well.

    Args:
        limit: samples of a part
        layout: tells where parts are needed; ``None`` to collate none
    """

    collate: Collate
    limit: int = 1
    layout: PartsLayout | None = None

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch as the script would have it, a :class:`PartedBatch` where it has several parts."""
        if self.layout is None or len(samples) <= self.limit:
            return self.collate(samples)
        copies = copied_samples(samples)  # before the first collating, which may change them
        whole = self.collate(samples)
        edges = edges_of_parts(len(samples), self.limit)
        try:
            if not self.layout.needs_parts(whole):
                return whole
            # The random numbers of the script are those that it has without parts.
            with random_state.kept():
                parts = [self.collate(copies[start:stop]) for start, stop in itertools.pairwise(edges)]
            return PartedBatch(whole, parts) if self.layout.fits(whole, parts, edges) else whole
        except Exception:  # noqa: BLE001 - of any code of the script's, which the batch itself does not need
            return whole


def copied_samples(samples: Sequence[Any]) -> list[Any]:
    """Return samples that may be collated once more: functions that do it take keys out of them."""
    return [copy.copy(each) if isinstance(each, list) or hasattr(each, "keys") else each for each in samples]
