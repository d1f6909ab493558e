"""What a Lightning ``Trainer`` knows of its training besides model, optimizers and schedulers, as a tracked object."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["Progress"]

_EPOCH_LOOP = "epoch_loop"
_BATCHES = f"{_EPOCH_LOOP}.batch_progress"


class Progress:
    """The progress of the loops and the states of the callbacks, as they were at the last capture.

    Args:
        trainer: trainer that fits a model

    Attributes:
        micro_batches: batches of a step, by which the loops count, in this process
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._captured: dict[str, Any] = {}
        self.micro_batches = 1

    def capture(self, *, between_epochs: bool = False) -> None:
        """Take over the trainer's current state.

        Args:
            between_epochs: whether all that belongs to an epoch is done
        """
        states = ((each.state_key, each.state_dict()) for each in self._trainer.callbacks)
        self._captured = {
            "loops": self._trainer.fit_loop.state_dict(),
            "callbacks": {key: state for key, state in states if state},
            "micro_batches": self.micro_batches,
            "between_epochs": between_epochs,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the last capture."""
        return self._captured

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the state of a former process."""
        if not state_dict:
            return
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        self._captured = state_dict
        loops = copy.deepcopy(state_dict["loops"])
        for counts in (loops[_BATCHES]["total"], loops[_BATCHES]["current"]):
            for name, count in counts.items():
                counts[name] = count // state_dict["micro_batches"] * self.micro_batches
        fit_loop.load_state_dict(loops)
        if state_dict["between_epochs"]:
            fit_loop.restarting = False  # the next epoch begins as after any other
        for callback in trainer.callbacks:
            if callback.state_key in state_dict["callbacks"]:
                callback.load_state_dict(copy.deepcopy(state_dict["callbacks"][callback.state_key]))
