"""Which samples an optimizer step trains, as pure functions that do not know the world size.

One global order per epoch follows from (seed, epoch). A step takes the *window* ``order[consumed : consumed + size]``
of it; each rank takes a contiguous share of the window, in one or several *micro-batches*. The state of the data is
therefore two numbers, the :class:`Cursor`, saved with the checkpoint and advanced only when a step is committed:
a crash replays the window together with the weights that it was about to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Self

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.permutation import Permutation

__all__ = ["Cursor", "DataSpec", "Order", "order", "parts", "require_same", "share", "weight"]

_ALGORITHM = "feistel-8"
"""Names the way from a seed to an order: another one needs another name."""


@dataclass(frozen=True)
class Cursor:
    """How far the data has been trained.

    Args:
        epoch: number of the epoch, from 0.
        consumed: samples of this epoch that committed steps have trained.
        streams: position of each shard stream: index of the shard in the stream, and number of samples read of it.
    """

    epoch: int = 0
    consumed: int = 0
    streams: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> list[Any]:
        """Return the numbers, to be saved with a checkpoint."""
        return [self.epoch, self.consumed, *([list(map(list, self.streams))] if self.streams else [])]

    @classmethod
    def from_json(cls, document: list[Any]) -> Self:
        """Return the inverse of :meth:`to_json`."""
        epoch, consumed, *rest = document
        return cls(int(epoch), int(consumed), tuple((int(at), int(read)) for at, read in (rest[0] if rest else ())))


@dataclass(frozen=True)
class DataSpec:
    """What must stay the same over all restarts of a run for each sample to be trained once an epoch.

    Args:
        length: samples in the dataset.
        global_batch_size: samples of one optimizer step over all ranks.
        seed: random seed of the order.
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
        """Samples that one epoch trains, at the global batch size."""
        return self.trained(0, self.global_batch_size)

    @property
    def windows(self) -> int:
        """Optimizer steps of one epoch, at the global batch size."""
        return -(-self.usable // self.global_batch_size)

    def trained(self, consumed: int, size: int) -> int:
        """Return the samples that an epoch will have trained when it goes on from there with windows of that size."""
        if not self.drop_last:
            return self.length
        return consumed + (self.length - consumed) // size * size

    def window(self, consumed: int, size: int) -> range:
        """Return the positions in the epoch's order that the next step trains; empty at the epoch's end."""
        return range(consumed, max(consumed, min(consumed + size, self.trained(consumed, size))))

    def to_json(self) -> dict[str, Any]:
        """Return the fields, to be saved with a checkpoint."""
        return asdict(self)

    def over(self, cursor: Cursor) -> bool:
        """Tell whether the epoch has no more samples."""
        return cursor.consumed >= self.usable

    def require_same(self, saved: Mapping[str, Any]) -> None:
        """Check that a checkpoint's cursor means the same here.

        Args:
            saved: what :meth:`to_json` returned.

        Raises:
            UsageError: it does not; the message names what changed.
        """
        require_same(saved, self.to_json())


def require_same(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that a checkpoint's cursor means the same for data as they were and as they are.

    Raises:
        UsageError: it does not; the message names what changed.
    """
    changed = [
        f"{name} was {saved.get(name)!r} and is {here.get(name)!r}"
        for name in dict.fromkeys([*saved, *here])
        if saved.get(name) != here.get(name)
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


def parts(
    count: int, world_size: int, rank: int, *, logical_workers: int | None = None, most: int | None = None
) -> list[range]:
    """Return a rank's micro-batches as parts of ``range(count)``; none where it has no sample.

    Args:
        count: samples of the window.
        world_size: ranks.
        rank: rank of the worker.
        logical_workers: among which the window is dealt out first, so that the micro-batches are the same at any
            world size; ``None`` deals it out to the ranks.
        most: samples of a micro-batch, ``None`` for any number.
    """
    if logical_workers is None:
        dealt = [share(count, world_size, rank)]
    else:
        dealt = [share(count, logical_workers, worker) for worker in share(logical_workers, world_size, rank)]
    found = []
    for whole in dealt:
        number = 1 if most is None else -(-len(whole) // most)
        for index in range(number):
            part = share(len(whole), number, index)
            found.append(whole[part.start : part.stop])
    return [each for each in found if each]


def weight(own: int, count: int, world_size: int) -> float:
    """Return the factor for a micro-batch's mean loss that makes the mean over the ranks the mean over the window.

    The wanted gradient is ``1/count * sum`` over the window; data parallelism computes ``1/world_size * sum``
    over the ranks of the sum over their micro-batches of each one's ``1/own * sum``.

    Args:
        own: samples of the micro-batch.
        count: samples of the window.
        world_size: ranks.
    """
    return own * world_size / count
