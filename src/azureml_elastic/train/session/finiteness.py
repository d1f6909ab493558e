"""Losses and weights that are NaN or infinite: noticed without waiting for the device, and kept out of checkpoints.

After a step, the loss and one small weight of each module are tested on the device, and the result is read when the
device has got that far. Gradients are averaged over the ranks before each step, so a NaN on one rank is in the weights
of all ranks after it. All weights are tested before a checkpoint or a snapshot is taken.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.config.checkpoint import NonFinitePolicy
from azureml_elastic.distributed.device import Fetched, device_of
from azureml_elastic.errors import NonFiniteError, RollbackRequired

__all__ = ["FinitenessWatch"]

_LOG = logging.getLogger(__name__)

_MOST_PENDING = 64
"""Steps that the device may be behind before this process waits for it."""


class FinitenessWatch:
    """The test of one rank.

    Args:
        policy: response to values that are not finite.
    """

    def __init__(self, policy: NonFinitePolicy) -> None:
        self._policy = policy
        self._probes: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._watches_loss = True
        self._losses: list[torch.Tensor] = []
        self._pending: deque[tuple[int, int, Fetched]] = deque()
        self._reported: set[str] = set()

    def attach(self, state: TrackedState) -> None:
        """Test the weights of the tracked modules from now on."""
        trained = [[each for each in module.parameters() if each.requires_grad] for module in state.modules]
        self._weights = [_local(each) for parameters in trained for each in parameters if _local(each).numel()]
        probes = (min(map(_local, each), key=torch.Tensor.numel, default=None) for each in map(_nonempty, trained))
        self._probes = [
            torch.view_as_real(each.detach()) if each.is_complex() else each for each in probes if each is not None
        ]
        # A scaled loss may overflow by design: the scaler then leaves the step out, and the weights stay finite.
        self._watches_loss = not state.scales_gradients

    def observe(self, loss: torch.Tensor) -> None:
        """Take the loss of a backward pass into account."""
        if self._watches_loss:
            self._losses.append(loss.detach())

    def end_step(self, step: int) -> None:
        """Test what the step has computed, and respond to what the device has computed so far.

        Raises:
            NonFiniteError: a step was not finite, and the policy ends the run.
            RollbackRequired: the weights are not finite, and the policy restarts the run.
        """
        losses, self._losses = self._losses, []
        if losses or self._probes:
            with torch.no_grad():
                # A sum is finite where all of its terms are, and on the CPU it takes a fifth of the time of isfinite().
                sums = torch.stack([each.sum(dtype=torch.float64) for each in (*losses, *self._probes)])
                self._pending.append((step, len(losses), device_of(sums.device).fetch(sums)))
        while self._pending:
            number, count, values = self._pending[0]
            if not values.arrived() and len(self._pending) <= _MOST_PENDING:
                break
            self._pending.popleft()
            finite = [math.isfinite(each) for each in values.read().tolist()]
            self._respond(number, loss=not all(finite[:count]), weights=not all(finite[count:]))

    def weights_are_sound(self) -> bool:
        """Return whether this process may pass its weights on to the next round. Waits for the device."""
        with torch.no_grad():
            return self._policy == "warn" or all(bool(torch.isfinite(each).all()) for each in self._probes)

    def weights_are_finite(self) -> bool:
        """Return whether all weights of this rank are finite. Waits for the device."""
        if not self._weights:
            return True
        with torch.no_grad():
            largest = torch._foreach_norm(self._weights, float("inf"))  # noqa: SLF001 - what clip_grad_norm_ uses
            return bool(torch.isfinite(torch.stack([each.float() for each in largest])).all())

    def _respond(self, step: int, *, loss: bool, weights: bool) -> None:
        what = "weights" if weights else "loss" if loss else ""
        if not what:
            return
        if self._policy == "warn" or (self._policy == "rollback" and what == "loss"):
            if what not in self._reported:
                self._reported.add(what)
                after = "No checkpoints are taken of such weights. " if weights else ""
                _LOG.warning(
                    "The %s of step %d: NaN or infinite. %sThis is reported once; see "
                    "CheckpointPolicy(on_nonfinite=...).",
                    what,
                    step,
                    after,
                )
            return
        if self._policy == "stop":
            raise NonFiniteError(
                f'The {what} of step {step} {"are" if weights else "is"} NaN or infinite, and on_nonfinite="stop" ends '
                "the run. The last checkpoint is of finite weights."
            )
        raise RollbackRequired(
            f'The weights of step {step} are NaN or infinite, and on_nonfinite="rollback" restarts the run from its '
            "last checkpoint, whose weights are finite."
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _nonempty(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in parameters if _local(each).numel()]
