"""Which samples an optimizer step trains, as pure functions that do not know the world size.

One global order per epoch follows from (seed, epoch). A step takes the *window* ``order[consumed : consumed + G]``
of it, whatever the number of ranks; each rank takes a contiguous share of the window. The state of the data is
therefore two numbers, the :class:`Cursor`, saved with the checkpoint and advanced only when a step is committed:
a crash replays the window together with the weights that it was about to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Self

from azureml_elastic.errors import UsageError
from azureml_elastic.train.permutation import Permutation

__all__ = ["Cursor", "DataSpec", "Order", "order", "share", "weight"]

_ALGORITHM = "feistel-8"
"""Names the way from a seed to an order: another one needs another name."""


@dataclass(frozen=True)
class Cursor:
    """How far the data has been trained.

    Args:
        epoch: counted from 0.
        consumed: samples of this epoch's order that committed steps have trained.
    """

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class DataSpec:
    """What must stay the same over all restarts of a run for each sample to be trained once an epoch.

    Args:
        length: samples in the dataset.
        global_batch_size: samples of one optimizer step over all ranks.
        seed: of the order.
        shuffle: whether the order is random, or that of the dataset.
        drop_last: whether the ``length % global_batch_size`` last samples of an epoch's order are left out.
        algorithm: that makes the order.
    """

    length: int
    global_batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    algorithm: str = _ALGORITHM

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UsageError("The dataset is empty; check the path or the filter that made it.")
        if self.global_batch_size < 1:
            raise UsageError(
                f"global_batch_size={self.global_batch_size} is below the limit of 1; give the samples of one "
                "optimizer step over all ranks."
            )
        if self.usable == 0:
            raise UsageError(
                f"The dataset has {self.length} samples, fewer than global_batch_size={self.global_batch_size}, "
                "and drop_last=True drops them all. Lower global_batch_size or give drop_last=False."
            )

    @property
    def usable(self) -> int:
        """Samples that one epoch trains."""
        return self.length - self.length % self.global_batch_size if self.drop_last else self.length

    @property
    def windows(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.usable // self.global_batch_size)

    def window(self, consumed: int) -> range:
        """Return the positions in the epoch's order that the next step trains; empty at the epoch's end."""
        return range(consumed, min(consumed + self.global_batch_size, self.usable))

    def to_json(self) -> dict[str, Any]:
        """Return the fields, to be saved with a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Return the inverse of :meth:`to_json`."""
        return cls(**{field.name: document[field.name] for field in fields(cls)})

    def require_same(self, saved: DataSpec) -> None:
        """Check that a checkpoint's cursor means the same here.

        Raises:
            UsageError: it does not; the message names what changed.
        """
        changed = [
            f"{field.name} was {getattr(saved, field.name)!r} and is {getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(saved, field.name) != getattr(self, field.name)
        ]
        if changed:
            raise UsageError(
                f"The data differ from those of the checkpoint: {', '.join(changed)}. Its position in the epoch "
                "means nothing for other data. Restore the former values, or start anew with an empty "
                "checkpoint folder."
            )


Order = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Tells which samples of the dataset stand at some positions of an epoch."""


def order(spec: DataSpec, epoch: int) -> Order:
    """Return the order in which the samples of an epoch are trained."""
    if not spec.shuffle:
        return lambda positions: positions
    return Permutation(spec.length, xxhash.xxh3_64_intdigest(f"{spec.seed}.{epoch}".encode()))


def share(count: int, world_size: int, rank: int) -> range:
    """Return the part of ``range(count)`` that a rank trains: contiguous, sizes differ by at most one."""
    quotient, rest = divmod(count, world_size)
    start = rank * quotient + min(rank, rest)
    return range(start, start + quotient + (rank < rest))


def weight(own: int, count: int, world_size: int) -> float:
    """Return the factor for a rank's mean loss that makes the mean over the ranks the mean over the window.

    The wanted gradient is ``1/count * sum`` over the window; data parallelism computes ``1/world_size * sum``
    over the ranks of each rank's ``1/own * sum``.

    Args:
        own: samples of the window that the rank trains.
        count: samples of the window.
        world_size: ranks.
    """
    return own * world_size / count
