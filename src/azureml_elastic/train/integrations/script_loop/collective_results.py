"""The results of a script's collectives in its trained steps, which answer the same calls where steps are repeated.

In repeated steps no rank waits for another, and some of those that have taken part in a collective may be gone. What it
has returned is the same on all ranks, so any rank's record of it answers all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch

LARGEST = 64
"""Numbers of a result that is kept: enough for a loss of each rank, not for the outputs of a model."""

_UNREAD = 1000
"""Results that stay on their device until they are read together: to read each one would wait for its kernels."""

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_NOT_KEPT = -1
_BATCHES = 1 << 40
"""More than any epoch has."""


class CollectiveResults:
    """The results of the collectives in the batches of each epoch, as a tracked object.

    They are ordered by epoch, batch and call. Batches are trained in this order, and again from one that has not
    counted. Flat columns hold them, as a training may have millions, which are in each capture of its state.
    """

    def __init__(self) -> None:
        self._batches = array("q")  # of each result: epoch * _BATCHES + batch
        self._kinds = array("q")  # index in _DTYPES, times two, plus the dimensions; or _NOT_KEPT
        self._ends = array("q")  # of its numbers
        self._numbers = array("d")  # exact for integers up to 2**53
        self._new: list[tuple[int, torch.Tensor | None]] = []
        self._batch = self._call = 0

    def train(self, epoch: int, batch: int) -> None:
        """Begin a batch that is trained: what is known of it, and of later ones, is of steps that have not counted."""
        self.repeat(epoch, batch)
        if self._new[-1][0] >= self._batch if self._new else self._batches and self._batches[-1] >= self._batch:
            self._read()
            first = bisect_left(self._batches, self._batch)
            del self._numbers[self._begin(first) :]
            for column in (self._batches, self._kinds, self._ends):
                del column[first:]

    def repeat(self, epoch: int, batch: int) -> None:
        """Begin a batch that is trained already."""
        self._batch, self._call = epoch * _BATCHES + batch, 0

    def note(self, result: torch.Tensor) -> None:
        """Add the result of a call in the current batch; kept are those of shape () or (n,), n up to ``LARGEST``."""
        kept = result.numel() <= LARGEST and result.dim() <= 1 and result.dtype in _DTYPES
        self._new.append((self._batch, result.detach().clone() if kept else None))  # the script may change it in place
        if len(self._new) >= _UNREAD:
            self._read()

    def next(self) -> torch.Tensor | None:
        """Return the result of the next call in the current batch, of shape () or (n,); ``None`` if it is not known."""
        self._read()
        found = bisect_left(self._batches, self._batch) + self._call
        self._call += 1
        if found >= len(self._batches) or self._batches[found] != self._batch or self._kinds[found] == _NOT_KEPT:
            return None
        dtype, dim = divmod(self._kinds[found], 2)
        numbers = torch.tensor(self._numbers[self._begin(found) : self._ends[found]], dtype=torch.float64)
        return numbers.to(_DTYPES[dtype]).reshape((-1,) if dim else ())

    def state_dict(self) -> dict[str, Any]:
        """Return all results."""
        self._read()
        columns = {"batches": self._batches, "kinds": self._kinds, "ends": self._ends}
        found = {name: torch.tensor(column, dtype=torch.int64) for name, column in columns.items()}
        numbers = torch.tensor(self._numbers, dtype=torch.float64)
        return {**found, "numbers": numbers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the results of a state."""
        columns = (array("q", state_dict[name].tolist()) for name in ("batches", "kinds", "ends"))
        self._batches, self._kinds, self._ends = columns
        self._numbers = array("d", state_dict["numbers"].tolist())
        self._new.clear()

    def _begin(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _read(self) -> None:
        for device, group in groupby(self._new, key=lambda each: None if each[1] is None else each[1].device):
            rows = list(group)
            kept = [result for _, result in rows if result is not None]
            if device is not None:
                self._numbers.extend(torch.cat([each.reshape(-1).double() for each in kept]).tolist())
            for batch, result in rows:
                self._batches.append(batch)
                self._kinds.append(_NOT_KEPT if result is None else _DTYPES.index(result.dtype) * 2 + result.dim())
                self._ends.append(self._begin(len(self._ends)) + (0 if result is None else result.numel()))
        self._new.clear()
