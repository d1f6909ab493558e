"""A learning rate scheduler that counts samples, so that it has the same effect at any world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from azureml_elastic.checkpoint.state.tracked import unwrap_scheduler
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.position import Position

__all__ = ["Schedule", "ScheduleCheck", "steps_of"]


class Schedule:
    """One of torch's schedulers, stepped as often as it would be at the reference world size.

    Where a step trains three times the samples of the reference, the scheduler advances by three steps. All attributes
    besides ``step()`` are those of the scheduler.

    Args:
        scheduler: scheduler of torch, or Accelerate's wrapper of one
        due: function that returns the number of reference steps of the current optimizer step, ``None`` outside of one

    Raises:
        UsageError: the scheduler follows a metric, not steps.
    """

    def __init__(self, scheduler: Any, due: Callable[[], int | None]) -> None:
        scheduler = unwrap_scheduler(scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau follows a metric, at any world size; step it yourself, without run.schedule()."
            )
        self._scheduler: LRScheduler = scheduler
        self._due = due

    def step(self) -> None:
        """Advance by the current optimizer step.

        Raises:
            UsageError: there is none.
        """
        steps = self._due()
        if steps is None:
            raise UsageError(
                "The schedule was stepped outside of an optimizer step. Call its step() between optimizer.step() and "
                "run.commit(); a scheduler that counts epochs needs no run.schedule()."
            )
        for _ in range(steps):
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler's state."""
        self._scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_scheduler"], name)


@dataclass(eq=False)
class ScheduleCheck:
    """Check that no tracked scheduler counts steps, because the number of samples of a step varies."""

    position: Position
    _counted: tuple[Any, list[int]] | None = field(default=None, init=False)

    def begin_step(self, tracked: TrackedState | None) -> None:
        """Count how often the schedulers were stepped, before the first step of an epoch or a round."""
        if self._counted is None or self._counted[0] != self._period:
            self._count(tracked)

    def end_step(self, tracked: TrackedState | None) -> None:
        """Raise ``UsageError`` if a scheduler was stepped since the step before, and not by :class:`Schedule`."""
        before = self._counted
        self._count(tracked)
        if before is None or self._counted is None or before[0] != self._counted[0] or tracked is None:
            return
        for scheduler, old, new in zip(tracked.schedulers, before[1], self._counted[1], strict=True):
            if old != new:
                raise UsageError(
                    f"{type(scheduler).__name__} was stepped with the optimizer, but the samples of a step depend "
                    "on the world size. Wrap it: scheduler = run.schedule(scheduler), and track that."
                )

    @property
    def _period(self) -> tuple[Any, int]:
        return self.position.epochs, self.position.generation

    def _count(self, tracked: TrackedState | None) -> None:
        if tracked is not None:
            self._counted = (self._period, [steps_of(scheduler) for scheduler in tracked.schedulers])


def steps_of(scheduler: Any) -> int:
    """Return how often one of torch's schedulers was stepped."""
    while not hasattr(scheduler, "last_epoch"):  # a chain is stepped as its parts are
        scheduler = scheduler._schedulers[0]  # noqa: SLF001
    return int(scheduler.last_epoch)
