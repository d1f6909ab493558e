"""A learning rate scheduler that counts samples, so that it means the same at any world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from azureml_elastic.checkpoint.state.tracked import unwrap_scheduler
from azureml_elastic.errors import UsageError

__all__ = ["Schedule", "steps_of"]


class Schedule:
    """One of torch's schedulers, stepped as often as it would be at the reference world size.

    Where a step trains three times the samples of the reference, the scheduler goes on by three steps. What it has
    besides ``step()`` is its own.

    Args:
        scheduler: to step, of torch or Accelerate's wrapper of one.
        due: returns the steps that the optimizer step at hand stands for, ``None`` outside of one.

    Raises:
        UsageError: it follows a metric, not steps.
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
        """Go on with the optimizer step at hand.

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


def steps_of(scheduler: Any) -> int:
    """Return how often one of torch's schedulers was stepped."""
    while not hasattr(scheduler, "last_epoch"):  # a chain is stepped as its parts are
        scheduler = scheduler._schedulers[0]  # noqa: SLF001
    return int(scheduler.last_epoch)
