"""The control group: a gloo group for small agreements between the ranks.

It is separate from the group that reduces gradients, also under NCCL, so that its collectives never mix with those of
backward passes. They have torch's timeout of 30 minutes; the death of a rank fails them at once, as its connections
break.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from azureml_elastic.errors import CheckpointError, UsageError
from azureml_elastic.plurals import counted

T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way to or from another rank, which lives here as long as gloo uses its memory."""

    work: dist.Work
    tensor: torch.Tensor

    def wait(self) -> None:
        """Wait for the end. In this module, so that a thread that waits here is known to be in a collective."""
        self.work.wait()


class ControlGroup:
    """A group for agreements between the ranks.

    Every method but ``close``, ``send`` and ``receive`` is a collective.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def close(self) -> None:
        """Release the group after the default group was destroyed, which ends its threads."""
        self._group = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The gloo group.

        Raises:
            UsageError: it is closed, as the session has ended.
        """
        if self._group is None:
            raise UsageError(
                "The training session has ended, and with it the group through which its ranks agree. What needs all "
                "ranks, such as run.evaluate(), belongs before the end of `with ... as run:`."
            )
        return self._group

    def from_main(self, value: T | None) -> T:
        """Return rank 0's value on every rank."""
        return self.from_rank(0, value)

    def from_rank(self, source: int, value: T | None) -> T:
        """Return one rank's value on every rank."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=source, group=self.group)
        return cast("T", values[0])

    def gather(self, value: T) -> list[T]:
        """Return all ranks' values on every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def send(self, tensor: torch.Tensor, rank: int, number: int) -> Transfer:
        """Begin to send a contiguous CPU tensor to a rank that receives it; it must not change until the end."""
        return Transfer(cast("dist.Work", dist.isend(tensor, rank, group=self.group, tag=number)), tensor)

    def receive(self, tensor: torch.Tensor, rank: int, number: int) -> Transfer:
        """Begin to overwrite a contiguous CPU tensor with one of as many bytes that a rank sends under this number."""
        return Transfer(cast("dist.Work", dist.irecv(tensor, rank, group=self.group, tag=number)), tensor)

    def all_true(self, value: bool) -> bool:
        """Return whether the value is true on every rank."""
        return bool(self.lowest(int(value)))

    def lowest(self, value: int) -> int:
        """Return the minimum of the ranks' numbers."""
        number = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self.group)
        return int(number.item())

    def total(self, value: float) -> float:
        """Return the sum of the ranks' numbers."""
        number = torch.tensor([value], dtype=torch.float64)  # exact for counts up to 2**53
        self.add_up(number)
        return float(number.item())

    def add_up(self, numbers: torch.Tensor) -> None:
        """Overwrite a CPU tensor with the sum over the ranks, whose tensors have its shape and type."""
        group = self.group  # which raises where the session has ended, also for one rank
        if self.world_size > 1:
            dist.all_reduce(numbers, group=group)

    def together(self, what: str, action: Callable[[], T], failure: Exception | None = None) -> list[T]:
        """Run a function without collectives on every rank and return all results in rank order.

        Raises:
            CheckpointError: a rank failed, before (``failure``) or in the function; raised on all ranks. The message
                begins with the name of the action (``what``).
        """
        result: Any = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - the other ranks must not wait for this one
            failure = error
        # Also from a rank that has failed: the others are in this collective, or will be, and learn of it here.
        outcomes = self.gather((None if failure is None else f"{type(failure).__name__}: {failure}", result))
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text is not None]
        if failed:
            text = f"{what} failed on {len(failed)} of {counted(self.world_size, 'rank')}: {'; '.join(failed)}"
            raise CheckpointError(text) from failure
        return [result for _, result in outcomes]
