"""Undoing what a script's code changes besides weights, in a step or the end of an epoch that does not count."""

from __future__ import annotations

from typing import Any

import torch

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState

__all__ = ["Undo"]


class Undo:
    """A copy of schedulers, other tracked objects, optimizer settings, buffers and random number generators.

    Args:
        state: tracked state
        device: device of the process
    """

    def __init__(self, state: TrackedState, device: torch.device) -> None:
        self._state = state
        self._device = device
        self._others = state.others()
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        self._settings = [(group, {key: _copy(group[key]) for key in group if key != "params"}) for group in groups]
        buffers = [buffer for module in state.modules for buffer in module.buffers()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._random = random_state.capture(device)

    def restore(self) -> None:
        """Restore the copy, and drop all gradients."""
        self._state.drop_gradients()
        self._state.restore_others(self._others)
        for group, settings in self._settings:
            for key, value in settings.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        random_state.restore(self._random, self._device)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
