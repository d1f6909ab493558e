"""When the next checkpoint is due, agreed without a collective at every step.

By steps it is simple: all ranks count the same. By wall time the ranks' clocks differ, so rank 0 decides for all, but
only at *decision steps*: each decision names the step of the next one, estimated from the pace so far. Right after the
start, when the pace is unknown, decisions come at 1, 2, 4, 8, ... steps; later about two for each checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from azureml_elastic.spec import CheckpointPolicy
from azureml_elastic.train.control import Control

__all__ = ["Cadence", "Decision", "decide"]


@dataclass(frozen=True)
class Decision:
    """What rank 0 has decided at a decision step.

    Args:
        save: whether a checkpoint is due now.
        steps_to_next: steps until the next decision, at least 1.
    """

    save: bool
    steps_to_next: int


def decide(
    every_seconds: float,
    since_save_seconds: float,
    steps_seen: int,
    seconds_per_step: float,
    *,
    tolerance: float = 0.02,
) -> Decision:
    """Decide whether a checkpoint is due, and when to ask again.

    Args:
        every_seconds: wanted between two checkpoints.
        since_save_seconds: since the last one, or since the start.
        steps_seen: steps since the start of this process.
        seconds_per_step: the mean pace over those steps.
        tolerance: part of ``every_seconds`` by which a checkpoint may come early.

    Returns:
        The decision.
    """
    remaining = every_seconds - since_save_seconds
    save = remaining <= tolerance * every_seconds
    target = every_seconds if save else remaining
    estimate = int(target / seconds_per_step) if seconds_per_step > 0 else steps_seen
    return Decision(save=save, steps_to_next=max(1, min(estimate, steps_seen)))


class Cadence:
    """Knows at each step whether a checkpoint is due; the same answer on every rank.

    Args:
        policy: of the checkpoints.
        control: the ranks' agreement, used at decision steps only.
        clock: monotonic, in seconds; only rank 0's counts.
    """

    def __init__(self, policy: CheckpointPolicy, control: Control, *, clock: Callable[[], float]) -> None:
        self._every_steps = policy.every_steps
        self._every = None if policy.every is None else policy.every.total_seconds()
        self._control = control
        self._clock = clock
        self._first_step = 0
        self._next_decision = 1
        self._began = self._saved_time = clock()

    def begin(self, step: int, unsaved_seconds: float = 0.0) -> None:
        """Count from here: training starts after this step.

        Args:
            step: completed so far.
            unsaved_seconds: since the last checkpoint, where it is older than this.
        """
        self._first_step = step
        self._next_decision = step + 1
        self._began = self._clock()
        self._saved_time = self._began - unsaved_seconds

    def enter(self, control: Control) -> None:
        """Agree with other ranks from now on."""
        self._control = control

    @property
    def unsaved_seconds(self) -> float:
        """Seconds since the last checkpoint, or since the start."""
        return self._clock() - self._saved_time

    def saved(self) -> None:
        """A checkpoint has just been taken."""
        self._saved_time = self._clock()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step. A collective at decision steps."""
        due = self._every_steps is not None and step % self._every_steps == 0
        if self._every is None or step < self._next_decision:
            return due
        now = self._clock()
        seen = step - self._first_step
        decision = self._control.from_main(
            decide(self._every, now - self._saved_time, seen, (now - self._began) / seen)
        )
        self._next_decision = step + decision.steps_to_next
        return due or decision.save
