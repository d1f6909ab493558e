"""What a ``Trainer`` knows of its training besides model, optimizer and scheduler, as a tracked object.

A step is complete before the callbacks' ``on_step_end``, and these before it is logged, evaluated and saved. The stage
says how far a process has got with what belongs to the last step, so that the next process does the rest, once.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import torch

__all__ = ["Progress", "Stage"]

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Stage(Enum):
    """What has been done of what belongs to the last completed step; the flags say what is due."""

    STEP = "step"
    """Nothing: the callbacks follow."""
    CALLBACKS = "callbacks"
    """The callbacks have run; logging, evaluation and saving follow as far as the flags request them."""
    DONE = "done"
    """All of it, but not the end of an epoch."""
    EPOCH_CALLBACKS = "epoch_callbacks"
    """The callbacks have run that follow the epoch's last step."""
    EPOCH = "epoch"
    """All of it, and of the epoch."""


class Progress:
    """The trainer's state as it was at the last capture.

    Args:
        trainer: trainer, whose state is made when it begins to train

    Attributes:
        stage: stage of the last capture, or of the former process
        unlogged: sum of the losses of the steps that are not logged, the same on all ranks
        line: what the log has of a step beside its loss, as far as it is known
        restored: state of the run before this process, ``None`` for the beginning
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._captured: dict[str, Any] = {}
        self.stage = Stage.DONE
        self.unlogged: torch.Tensor | float = 0.0
        self.line: dict[str, Any] = {}
        self.restored: dict[str, Any] | None = None

    def capture(self, stage: Stage) -> None:
        """Take over the trainer's current state."""
        trainer, self.stage = self._trainer, stage
        state = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
        state["stateful_callbacks"] = self._callbacks()
        state["total_flos"] += trainer.current_flos * trainer.args.world_size  # of steps that are not logged
        self._captured = {
            "state": state,
            "logged": len(trainer.state.log_history),
            "flags": {name: getattr(trainer.control, name) for name in _FLAGS},
            "loss": trainer._total_loss_scalar,  # noqa: SLF001 - the mean loss of the whole training comes of it
            "unlogged": self.unlogged,
            "last_logged": trainer._globalstep_last_logged,  # noqa: SLF001
            "line": dict(self.line),
            "stage": stage.value,
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the last capture; numbers that a GPU computes are read only here."""
        captured = self._captured
        if not captured:
            return {}
        state = {**captured["state"], "log_history": captured["state"]["log_history"][: captured["logged"]]}
        line = {name: float(value) for name, value in captured["line"].items() if value is not None}
        return {**captured, "state": state, "unlogged": float(captured["unlogged"]), "line": line}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a former process, or of the last capture."""
        self._captured = self.restored = state_dict
        if state_dict:
            self.stage, self.unlogged = Stage(state_dict["stage"]), state_dict["unlogged"]
