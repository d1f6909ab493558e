"""The states of a training step: what each call makes of them, and what is to be done then.

One machine in each process knows whether the weights are those of a completed step, whether the step in progress
counts, and what waits until the script's code after a step has ended. It decides; the session copies, undoes and saves.
Nothing here knows torch, the agent or the data, so a test is a list of calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum


class StepState(Enum):
    """What a process does with its step."""

    BETWEEN = "between steps"
    """The last step is complete, and so is all that follows it."""
    ACCUMULATING = "accumulating"
    """Batches of the next step were taken. The weights are still those of the last one."""
    STEPPED = "stepped"
    """The optimizer steps, or has stepped: until the commit, the weights are those of no completed step."""
    AT_BOUNDARY = "at a boundary"
    """The step is counted. The agent is asked what is due; checkpoints are taken, or the round is left."""
    DEFERRED = "deferred"
    """The step is counted, and the script's code that belongs to it runs. The boundary waits for its end."""
    DISCARDED = "discarded"
    """The step does not count, as its round has ended or it was trained before: its commit undoes its changes."""
    RESTORING = "restoring"
    """The state is being replaced by that of another step: the weights are those of none."""
    OVER = "over"
    """The session has ended. Nothing is handed over any more."""


@dataclass(frozen=True)
class Deferred:
    """What is done when the script's code after a step has ended.

    Args:
        boundary: whether the boundary of the step is to come
        save: whether a ``run.save()`` of that code waits for its commit, ``None`` without one
    """

    boundary: bool = False
    save: bool | None = None


_COUNTABLE = (StepState.BETWEEN, StepState.ACCUMULATING, StepState.STEPPED, StepState.DEFERRED)

_OF_NO_STEP = (StepState.STEPPED, StepState.RESTORING, StepState.OVER)


class StepMachine:
    """The step of one process. A call that is impossible in a state raises ``RuntimeError``.

    Attributes:
        deferred: what waits for the end of the script's code after the last step, ``None`` where there is no such code
        reading: whether the state is being copied: a sharded optimizer that has not stepped yet then takes an empty
            step to have a state, which is none of the run's
    """

    def __init__(self) -> None:
        self.state = StepState.BETWEEN
        self.deferred: Deferred | None = None
        self.reading = False

    @property
    def whole(self) -> bool:
        """Whether the weights are those of a completed step."""
        return self.state not in _OF_NO_STEP

    @property
    def discarded(self) -> bool:
        """Whether the step in progress does not count."""
        return self.state is StepState.DISCARDED

    @property
    def in_step(self) -> bool:
        """Whether a step has begun that counts."""
        return self.state in (StepState.ACCUMULATING, StepState.STEPPED)

    @property
    def pending(self) -> bool:
        """Whether the script's code that belongs to the last step has not ended."""
        return self.deferred is not None

    @property
    def over(self) -> bool:
        """Whether the session has ended."""
        return self.state is StepState.OVER

    def first_update(self, *, has_loader: bool) -> bool:
        """Return whether an optimizer that steps now is the first in a step that counts."""
        begun = self.state is StepState.ACCUMULATING  # without a loader no call says so before the optimizer steps
        return not self.reading and (
            begun or (not has_loader and self.state in (StepState.BETWEEN, StepState.DEFERRED))
        )

    # --- the step -----------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """A loader yields a batch of the next step, or another one of this step; return whether it begins a step."""
        self._require("a batch was taken", *{*StepState} - {StepState.DEFERRED})  # what waits would be forgotten
        if self.state is not StepState.BETWEEN:
            return False
        self.state = StepState.ACCUMULATING
        return True

    def leave(self) -> None:
        """The script has left the loop over its batches before the step was complete."""
        if self.state is StepState.ACCUMULATING:
            self.state = StepState.BETWEEN

    def update(self) -> None:
        """An optimizer begins to change the weights, or has changed them."""
        if not self.reading and self.state in (StepState.BETWEEN, StepState.ACCUMULATING, StepState.DEFERRED):
            self.state = StepState.STEPPED

    def revert_update(self) -> None:
        """What the first optimizer of the step has changed is undone: the weights are those of the last step."""
        if self.state is StepState.STEPPED:
            self.state = self._settled

    def complete(self, *, pending: bool) -> bool:
        """The script has committed a step that counts; return whether its boundary follows at once.

        Args:
            pending: whether code of the script follows that belongs to the step
        """
        self._require("a step was completed", *_COUNTABLE)
        if pending or self.deferred is not None:
            self.deferred = replace(self.deferred or Deferred(), boundary=True)
            self.state = StepState.DEFERRED
            return False
        self.state = StepState.AT_BOUNDARY
        return True

    # --- the boundary -------------------------------------------------------------------------------------------------

    def begin_boundary(self) -> None:
        """A boundary, or a checkpoint between two steps, begins."""
        if self.state is StepState.BETWEEN:
            self.state = StepState.AT_BOUNDARY

    def end_boundary(self) -> None:
        """It has ended, well or with an error."""
        if self.state is StepState.AT_BOUNDARY:
            self.state = StepState.BETWEEN

    def defer(self) -> None:
        """Code follows that belongs to the last step, or to its epoch; also where a new process continues in it."""
        self._require("code followed a step", StepState.BETWEEN, StepState.DEFERRED, StepState.STEPPED)
        self.deferred = self.deferred or Deferred()
        if self.state is StepState.BETWEEN:
            self.state = StepState.DEFERRED

    def defer_save(self, *, wait: bool) -> bool:
        """The script asks for a checkpoint; return whether that has to wait for the end of its code."""
        if self.deferred is None:
            return False
        self.deferred = replace(self.deferred, save=wait or bool(self.deferred.save))
        return True

    def end_code(self) -> Deferred:
        """The script's code after a step has ended; return what is to be done now."""
        due, self.deferred = self.deferred or Deferred(), None
        if self.state is StepState.DEFERRED:
            self.state = StepState.BETWEEN
        return due

    # --- other rounds -------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """The step in progress does not count; its changes are to be undone."""
        self._require("a step was discarded", *_COUNTABLE[:2], StepState.DEFERRED, StepState.DISCARDED)
        self.state = StepState.DISCARDED

    def undone(self) -> None:
        """The changes of a discarded step are undone."""
        self._require("a step was undone", StepState.DISCARDED)
        self.state = self._settled

    def restore(self) -> None:
        """The state is about to be replaced by another one."""
        self._require("the state was replaced", *{*StepState} - {StepState.OVER})
        self.state = StepState.RESTORING

    def restored(self, *, in_step: bool) -> None:
        """The state is that of a completed step again.

        Args:
            in_step: whether batches of the next step are taken
        """
        self._require("the state was restored", StepState.RESTORING)
        self.state = StepState.ACCUMULATING if in_step and self.deferred is None else self._settled

    def finish(self) -> None:
        """The session has ended."""
        self.state, self.deferred = StepState.OVER, None

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Run a block that copies the state; optimizers that step in it take an empty step."""
        before, self.reading = self.reading, True
        try:
            yield
        finally:
            self.reading = before

    @property
    def _settled(self) -> StepState:
        return StepState.BETWEEN if self.deferred is None else StepState.DEFERRED

    def _require(self, what: str, *states: StepState) -> None:
        if self.state not in states:
            raise RuntimeError(f"A defect of azureml_elastic: {what} in the state {self.state.value!r}.")
