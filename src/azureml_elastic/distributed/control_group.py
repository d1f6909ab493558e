"""Agreement between the ranks, on a gloo group of its own.

The group exists beside the one that reduces gradients, also under NCCL, so that what is agreed here never mixes with
what backward passes have in flight. Collectives have torch's own timeout of 30 minutes; a rank that dies is noticed at
once, because its connections break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from azureml_elastic.errors import CheckpointError, UsageError

__all__ = ["ControlGroup"]

T = TypeVar("T")


class ControlGroup:
    """The ranks' agreement. Every method is a collective: all ranks call it, in the same order."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def close(self) -> None:
        """Let go of the group, which is left already: its threads end here and now."""
        self._group = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks' own group.

        Raises:
            UsageError: it was left; the session is over.
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
        result: T = values[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Return all ranks' values on every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a CPU tensor by one rank's."""
        dist.broadcast(tensor, src=source, group=self.group)

    def all_true(self, value: bool) -> bool:
        """Return whether every rank says so."""
        return bool(self.lowest(int(value)))

    def lowest(self, value: int) -> int:
        """Return the lowest of the ranks' numbers."""
        number = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self.group)
        return int(number.item())

    def total(self, value: float) -> float:
        """Return the sum of the ranks' numbers."""
        number = torch.tensor([value], dtype=torch.float64)
        self.add_up(number)
        return float(number.item())

    def add_up(self, numbers: torch.Tensor) -> None:
        """Overwrite a CPU tensor by the sum of the ranks'."""
        dist.all_reduce(numbers, group=self.group)

    def together(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run something on every rank and return all results in rank order.

        Args:
            what: is being done, for the message.
            action: without collectives inside.

        Raises:
            CheckpointError: it failed on at least one rank; raised on all of them.
        """
        failure: Exception | None = None
        outcome: tuple[str | None, T | None]
        try:
            outcome = (None, action())
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            failure = error
            outcome = (f"{type(error).__name__}: {error}", None)
        outcomes: list[Any] = self.gather(outcome)
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text is not None]
        if failed:
            raise CheckpointError(
                f"{what} failed on {len(failed)} of {self.world_size} ranks: {'; '.join(failed)}"
            ) from (failure)
        return [result for _, result in outcomes]
