"""What a ``Trainer`` knows of its training besides model, optimizer and scheduler, as a tracked object."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Progress"]

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Progress:
    """The trainer's state as it was at the last step boundary.

    Args:
        trainer: trainer, whose state is made when it begins to train

    Attributes:
        pending: whether a step is complete, but not the logging, evaluation and saving that follow it
        restored: state of the run before this process, ``None`` for the beginning
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._captured: dict[str, Any] = {}
        self.pending = False
        self.restored: dict[str, Any] | None = None

    def capture(self) -> None:
        """Take over the trainer's current state."""
        trainer = self._trainer
        state = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
        state["stateful_callbacks"] = self._callbacks()
        self._captured = {
            "state": state,
            "logged": len(trainer.state.log_history),
            "flags": {name: getattr(trainer.control, name) for name in _FLAGS},
            "loss": trainer._total_loss_scalar,  # noqa: SLF001 - the mean loss of the whole training comes of it
            "pending": self.pending,
        }

    def _callbacks(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by class, as ``Trainer._save_checkpoint`` writes them."""
        trainer = self._trainer
        found: dict[str, list[Any]] = {}
        for callback in (*trainer.callback_handler.callbacks, trainer.control):
            if type(callback).__name__ in trainer.state.stateful_callbacks:
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in found.items()}

    def apply_flags(self, restored: dict[str, Any]) -> None:
        """Request again what a step requested whose following code has not run."""
        for name, value in restored["flags"].items():
            setattr(self._trainer.control, name, value)
        self._trainer.control.should_log = False  # its losses are gone

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the last step boundary."""
        captured = self._captured
        if not captured:
            return {}
        state = {**captured["state"], "log_history": captured["state"]["log_history"][: captured["logged"]]}
        return {**captured, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a former process, or of the last capture."""
        self._captured = self.restored = state_dict
