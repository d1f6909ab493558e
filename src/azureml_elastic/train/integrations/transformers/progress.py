"""What a ``Trainer`` knows of its training besides model, optimizer and scheduler, as a tracked object.

A step is complete before the callbacks' ``on_step_end``, and these before it is logged, evaluated and saved. The stage
says how far a process has got with what belongs to the last step, so that the next process does the rest, once.

``Trainer`` hands the number of labels of a step to each model whose ``forward`` has ``**kwargs``, and takes its loss
for a sum over the rank's labels divided by it. Many models ignore the number and return the mean over the micro-batch
instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from azureml_elastic.train.integrations.transformers.training_data import TrainingData

IGNORED_LABEL = -100

_MOVES = ("to", "cuda", "cpu", "detach", "clone", "contiguous")
"""Methods whose result is the same number."""

_PROPERTIES = ("__get__", "__repr__", "__format__", "size", "dim", "numel", "is_floating_point", "record_stream")

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class LabelCount(torch.Tensor):
    """A number of labels.

    Attributes:
        used: whether a computation has used the number, other than to move it to a device
    """

    used: list[bool]

    @staticmethod
    def of(number: torch.Tensor) -> LabelCount:
        """Return a number that was not used yet."""
        count = number.as_subclass(LabelCount)
        count.used = [False]  # a list: what a model moves to a device shares it
        return count

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with plain tensors, and note it."""
        found = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, LabelCount)]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the documented way to plain behaviour
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _MOVES and isinstance(result, torch.Tensor):
            moved = result.as_subclass(LabelCount)
            moved.used = found[0].used
            return moved
        if name not in _PROPERTIES:
            for each in found:
                each.used[0] = True
        return result.as_subclass(torch.Tensor) if isinstance(result, LabelCount) else result


def count_labels(trainer: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the number of labels of a micro-batch, (), as the trainer counts them, without waiting for a GPU."""
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch["labels"]
        if getattr(trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
    return torch.as_tensor(labels.ne(IGNORED_LABEL).sum())


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

    Attributes:
        stage: stage of the last capture, or of the former process
        unlogged: sum of the losses of the steps that are not logged, the same on all ranks
        line: what the log has of a step beside its loss, as far as it is known
        restored: state of the run before this process, ``None`` for the beginning
    """

    def __init__(self, trainer: Any, data: TrainingData) -> None:
        self._trainer = trainer
        self._data = data
        self._captured: dict[str, Any] = {}
        self.stage = Stage.DONE
        self.unlogged: torch.Tensor | float = 0.0
        self.line: dict[str, Any] = {}
        self.restored: dict[str, Any] | None = None

    def capture(self, stage: Stage) -> None:
        """Take over the trainer's current state."""
        trainer, left, self.stage = self._trainer, self._data.left, stage
        state = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
        state["stateful_callbacks"] = self._callbacks()
        state["total_flos"] += trainer.current_flos * trainer.args.world_size  # of steps that are not logged
        self._captured = {
            "state": state,
            "logged": len(trainer.state.log_history),  # a list that only grows: no step copies it
            "flags": {name: getattr(trainer.control, name) for name in _FLAGS},
            "loss": trainer._total_loss_scalar,  # noqa: SLF001 - the mean loss of the whole training comes of it
            "unlogged": self.unlogged,
            "last_logged": trainer._globalstep_last_logged,  # noqa: SLF001
            "line": dict(self.line),
            "stage": stage.value,
            "left": None if left is None else (left.epoch, left.trained),
        }

    def _callbacks(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by class, as ``Trainer._save_checkpoint`` writes them."""
        trainer = self._trainer
        found: dict[str, list[Any]] = {}
        for callback in (*trainer.callback_handler.callbacks, trainer.control):
            if type(callback).__name__ in trainer.state.stateful_callbacks:
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: states[0] if len(states) == 1 else states for name, states in found.items()}

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
