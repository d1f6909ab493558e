"""What a Lightning ``Trainer`` knows of its training besides model, optimizers and schedulers, as a tracked object.

A step is complete before its hooks have run, and they before its validation and the end of its epoch. The stage says
how far a process has got with what belongs to the last step, so that the next process does the rest, once.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

from azureml_elastic.distributed.device import Fetched
from azureml_elastic.train.integrations.lightning import epoch_metrics, replay

__all__ = ["Progress", "Stage"]

_BATCHES = "epoch_loop.batch_progress"
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_UNSAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", "current_score")
"""What ``ModelCheckpoint`` leaves out of its state, or does not restore from it."""


class Stage(Enum):
    """What has been done of what belongs to the last completed step."""

    STEP = "step"
    """Nothing: the hooks of its last batch follow."""
    HOOKS = "hooks"
    """The hooks have run on all ranks: a validation may follow, and the end of the epoch."""
    VALIDATED = "validated"
    """All but the end of the epoch."""
    DONE = "done"
    """All of it, within an epoch."""
    EPOCH = "epoch"
    """All of it, and of the epoch."""


class Progress:
    """The progress of the loops, the states of the callbacks and the metrics, as they were at the last capture.

    Args:
        trainer: trainer that fits a model

    Attributes:
        micro_batches: batches of a step, by which the loops count, in this process
        versions: versions of the trainer's loggers
        loaded: whether a former process has trained
        stage: stage of the last capture, or of the former process
        sums: what former processes have added up in this epoch, see :mod:`~.epoch_metrics`
        record: what the hooks of the last step need, see :func:`~.replay.recorded`
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._captured: dict[str, Any] = {}
        self.micro_batches = 1
        self.versions: list[Any] = []
        self.loaded = False
        self.stage = Stage.DONE
        self.sums: epoch_metrics.Sums = {}
        self.record: dict[str, dict[str, float | Fetched]] = {}

    def capture(self, stage: Stage) -> None:
        """Take over the trainer's current state."""
        trainer, self.stage = self._trainer, stage
        states = ((each.state_key, each.state_dict()) for each in trainer.callbacks)
        datamodule = None if trainer.datamodule is None else trainer.datamodule.state_dict()
        self._captured = {
            "loops": _state_of(trainer.fit_loop),
            "callbacks": {key: state for key, state in states if state},
            "checkpoints": {
                each.state_key: {name: getattr(each, name) for name in _UNSAVED if hasattr(each, name)}
                for each in trainer.checkpoint_callbacks
            },
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS},  # noqa: SLF001
            "sums": {} if stage is Stage.EPOCH else epoch_metrics.added_up(trainer, self.sums),
            "ranks": trainer.world_size,
            "record": self.record if stage is Stage.STEP else {},
            "should_stop": trainer.should_stop,
            "datamodule": datamodule or {},
            "loggers": {"versions": self.versions, "lines": self._lines()},
            "micro_batches": self.micro_batches,
            "stage": stage.value,
        }

    def _lines(self) -> int:
        """Return the number of steps that are logged."""
        # After the hooks the line of the step is written, whose number is not counted yet.
        return int(self._trainer.fit_loop.epoch_loop._batches_that_stepped) + (self.stage is Stage.HOOKS)  # noqa: SLF001

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the last capture."""
        record = {"record": replay.numbers(self._captured["record"])} if self._captured else {}
        return {**self._captured, **record}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the state of a former process."""
        if not state_dict:
            return
        trainer, self._captured, self.loaded = self._trainer, state_dict, True
        self.stage, self.record = Stage(state_dict["stage"]), state_dict["record"]
        self.sums = epoch_metrics.divided(state_dict["sums"], state_dict["ranks"], trainer.world_size)
        self._load_loops(copy.deepcopy(state_dict["loops"]), state_dict["micro_batches"])
        for callback in trainer.callbacks:
            if callback.state_key in state_dict["callbacks"]:
                self._load_callback(callback, copy.deepcopy(state_dict["callbacks"][callback.state_key]))
        for checkpoint in trainer.checkpoint_callbacks:
            for name, value in state_dict["checkpoints"].get(checkpoint.state_key, {}).items():
                setattr(checkpoint, name, value)
        for name, values in state_dict["metrics"].items():
            setattr(trainer._logger_connector, name, dict(values))  # noqa: SLF001
        trainer.should_stop = state_dict["should_stop"]
        if state_dict["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(copy.deepcopy(state_dict["datamodule"]))

    def _load_loops(self, loops: dict[str, Any], micro_batches: int) -> None:
        """Restore the loops as after the hooks of the last batch, which the integration repeats by itself."""
        fit_loop, batches = self._trainer.fit_loop, loops[_BATCHES]
        for kind in ("total", "current"):
            counts = batches[kind]
            done = {name: counts["ready"] if self.stage is Stage.STEP else count for name, count in counts.items()}
            batches[kind] = {name: count // micro_batches * self.micro_batches for name, count in done.items()}
        fit_loop.load_state_dict(loops)
        if self.stage is Stage.EPOCH:
            _begin_anew(fit_loop)

    @staticmethod
    def _load_callback(callback: Any, state: dict[str, Any]) -> None:
        if "dirpath" in state and hasattr(callback, "best_k_models"):
            state["dirpath"] = callback.dirpath  # with another one, the best of the run so far would be forgotten
        callback.load_state_dict(state)


def _state_of(loop: Any, prefix: str = "") -> dict[str, Any]:
    """Return what ``loop.state_dict()`` does, which copies by ``dataclasses.asdict``: it is taken twice in a step."""
    state = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if hasattr(value, "on_iteration_done"):
            state |= _state_of(value, f"{prefix}{name}.")
        elif hasattr(value, "from_state_dict"):
            state[f"{prefix}{name}"] = _counts(value)
    return state


def _counts(progress: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else _counts(value) for name, value in vars(progress).items()}


def _begin_anew(loop: Any) -> None:
    """Have a loop and those in it begin the next epoch as after any other; their setter would not, by ``max_steps``."""
    loop._restarting = False  # noqa: SLF001
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting"):
            _begin_anew(inner)
