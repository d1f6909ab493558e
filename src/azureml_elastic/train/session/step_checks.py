"""The checks of a step: its gradients are complete before an update, its weights are those of a step, and finite.

**The guard before an update.** The host of a GPU queues the backward pass, its all-reduces and the optimizer's update
long before the device gets to them. When a peer is lost, the all-reduces that wait for it are aborted: their kernels
end and leave garbage in the gradients, and an update that was queued behind them would apply it. A step like that looks
complete to the host.

Before the first kernel of an update is queued, the host therefore waits until the device has completed all work of the
backward pass, and then asks whether the round is still whole. If it is, the update needs no peer any more: the state is
that of a completed step as soon as the device has drained, whatever happens to the peers. If it is not, the step is
discarded, as on a CPU, where the collective itself would have failed.

*Why a collective that an abort has ended is never taken for a complete one.* The thread that receives the agent's
message sets the flag of the interruption first, and aborts the communicators after that. A kernel that the abort has
ended is complete later than the abort has begun, and so is the mark behind it; the flag is read after the mark has been
reached, so it is set then. Nobody else aborts: :data:`~azureml_elastic.distributed.device._WATCHDOG` keeps torch's
watchdog from it, and where a user's settings let it, it records the error before it aborts, which is asked for as well.
A kernel whose peer is gone does not end by itself: it waits for data in its memory, which no one writes any more.

A collective that is complete with the flag set is discarded, too. Another survivor may have taken the same step for
complete; then its state is a step further, and all continue from that, as after any loss.

**An update that a lost peer interrupts.** A step of an optimizer may have collectives of its own: in a closure that
computes gradients several times (``LBFGS``), or between its changes. Where one of them fails, the weights are those of
no step. They are copied before the step of an optimizer that is known to call its closure more than once, and restored.

**Weights that change outside of a step**, such as those that a script exchanges for their moving average while it
evaluates, or disturbs before another backward pass, are those of no step either. Nothing says so: the sum of one small
weight of each module is compared with the one at the last moment at which the weights were those of a step.

**Losses and weights that are NaN or infinite** are noticed without waiting for the device, and kept out of checkpoints.
After a step, the loss and one small weight of each module are tested on the device, and the result is read when the
device has got that far. Gradients are averaged over the ranks before each step, so a NaN on one rank is in the weights
of all ranks after it. All weights are tested before a checkpoint or a snapshot is taken.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map_only

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.config.policies import NonFinitePolicy
from azureml_elastic.distributed.device import Device, Fetched, device_of
from azureml_elastic.errors import NonFiniteError, RollbackRequired, RoundBroken
from azureml_elastic.ipc.agent_interface import Agent

_LOG = logging.getLogger(__name__)

_SHORTEST_SECONDS = 50e-6
_LONGEST_SECONDS = 1e-3
_PAUSE_SHARE = 0.01
"""Pauses between two questions to the device, as a share of the wait so far: so late is an update at most."""

_UNSEEN_STEPS = 3
"""Steps in a row whose update no optimizer has announced, after which that is no accident."""

_MOST_PENDING = 64
"""Steps that the device may be behind before this process waits for it."""


class UpdateGuard:
    """The guard of one process."""

    def __init__(self, device: Device, agent: Agent) -> None:
        self._device = device
        self._agent = agent
        self._several = False
        self._scales = False
        self._covered: tuple[int, ...] | None = None  # collectives that were complete in a whole round, by group
        self._announced = False  # whether an update has been queued behind a passed guard since the last step
        self._unseen = 0
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._in_step = False
        self._repeating: set[int] = set()  # optimizers that have called a closure more than once in a step
        self._kept: OptimizerCopy | None = None

    @property
    def _hands_over(self) -> bool:
        # Without an agent that holds states nobody interrupts a round, and nothing would be handed over.
        return self._several and self._agent.holds_snapshots

    @property
    def _needed(self) -> bool:
        return self._hands_over and self._device.runs_behind

    def enter(self, world_size: int) -> None:
        """Begin a round, whose groups are new."""
        self._several = world_size > 1
        self._covered = self._kept = None
        self._announced = self._in_step = False

    def attach(self, state: TrackedState) -> None:
        """Keep the buffers of the tracked modules."""
        self._scales = state.scales_gradients
        self._buffers = list({id(each): each for module in state.modules for each in module.buffers()}.values())

    def before_update(self) -> None:
        """Wait until the gradients are complete on the device, before an update is queued. Raises as :meth:`wait`."""
        if not self._needed or self._device.recording():
            return  # a graph that is recorded can wait for nothing; its replays are waited for at each commit
        if self._device.queued_collectives() != self._covered:  # not so before the second of two optimizers
            self.wait()
        self._announced = True

    def before_scaler(self) -> None:
        """Do the same where a ``GradScaler`` is tracked, which by garbage leaves the step out and changes its scale."""
        if self._scales:
            self.before_update()

    def wait(self) -> None:
        """Wait until all queued work is complete.

        Raises:
            RoundBroken: the round was interrupted meanwhile, so that collectives may have been aborted.
            RuntimeError: a communicator has failed.
        """
        if not self._needed:
            return
        queued, complete = self._device.queued_collectives(), self._device.mark()
        begun, interrupted = time.monotonic(), False
        while not (interrupted or complete()):
            pause = (time.monotonic() - begun) * _PAUSE_SHARE
            interrupted = self._agent.wait_interrupted(min(max(pause, _SHORTEST_SECONDS), _LONGEST_SECONDS))
            self._require_sound()
        self._require_sound()
        # Not before: see the top of this module for the order of flag, abort, end of a kernel and this question.
        if self._agent.wait_interrupted(0):
            raise RoundBroken("The round was interrupted before the gradients of this step were complete.")
        self._covered = queued

    def step_is_covered(self) -> bool:
        """Return whether no collective was queued behind the guard of this step's update, if it had one."""
        return not self._needed or (self._announced and self._device.queued_collectives() == self._covered)

    def begin_step(self) -> None:
        """Keep the buffers as they are before a step, whose forward pass may be broken off while it receives them."""
        if not (self._hands_over and self._buffers):
            return
        if not self._copies:
            self._copies = [torch.empty_like(each) for each in self._buffers]
        self._device.copy(self._copies, self._buffers)
        self._in_step = True

    def end_step(self) -> None:
        """Note that a step is complete."""
        self._unseen = 0 if self._announced or not self._needed else self._unseen + 1
        if self._unseen == _UNSEEN_STEPS and not self._scales:
            _LOG.warning(
                "The last %d steps were updated without a call of a tracked optimizer's step(), as by a CUDA graph or "
                "a compiled step. Each step is waited for, and the sudden loss of a node costs the steps since the "
                "last snapshot. Leave optimizer.step() outside of the graph.",
                _UNSEEN_STEPS,
            )
        self._announced = self._in_step = False

    def begin_update(self, optimizer: Optimizer) -> None:
        """Copy weights that are those of a step, before an update whose closure is called between several changes."""
        if self._hands_over and (isinstance(optimizer, LBFGS) or id(optimizer) in self._repeating):
            self._kept = OptimizerCopy(optimizer)

    def expect_repetition(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has called its closure again, and will do so in later steps."""
        self._repeating.add(id(optimizer))

    def end_update(self) -> None:
        """Note that an update is complete."""
        self._kept = None

    def undo_step(self) -> bool:
        """Restore the buffers of the last complete step if another one has begun, and what was copied for its update.

        Returns:
            Whether an update was undone.
        """
        if self._in_step:
            self._device.copy(self._buffers, self._copies)
            self._in_step = False
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.restore()
        return kept is not None

    def _require_sound(self) -> None:
        error = self._device.communicator_error()
        if error is not None:
            raise RuntimeError(error)


class OptimizerCopy:
    """A copy of an optimizer's weights, states and settings.

    Args:
        device: where the copy is kept, ``None`` for the devices of what is copied
    """

    def __init__(self, optimizer: Optimizer, device: torch.device | None = None) -> None:
        self._optimizer = optimizer
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        self._weights = [(each, _Kept.of(each, device)) for each in weights]
        # A parameter is a key of the states, and must stay the same object.
        self._states = {
            key: tree_map_only(torch.Tensor, lambda each: _Kept.of(each, device), state)
            for key, state in optimizer.state.items()
        }

    def restore(self) -> None:
        """Give the optimizer back what it had."""
        with torch.no_grad():
            for weight, kept in self._weights:
                weight.copy_(kept.value)
        states = tree_map_only(_Kept, _Kept.given_back, list(self._states.values()))
        self._optimizer.state.clear()
        self._optimizer.state.update(zip(self._states, states, strict=True))
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings)


@dataclass(frozen=True)
class _Kept:
    """A copy of a tensor, and the device that it belongs to."""

    value: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device | None) -> _Kept:
        return cls(tensor.detach().to(device or tensor.device, copy=True), tensor.device)

    def given_back(self) -> torch.Tensor:
        return self.value.to(self.device)


class WeightsWatch:
    """The test of one rank: whether weights are finite, and those of a completed step."""

    def __init__(self, policy: NonFinitePolicy) -> None:
        self._policy = policy
        self._probes: list[torch.Tensor] = []
        self._trained: list[int] = []  # those of the probes that an optimizer changes
        # Sum of each probe while the weights were those of a completed step, float64 ().
        self._known: list[torch.Tensor] | None = None
        self._weights: list[torch.Tensor] = []
        self._watches_loss = True
        self._losses: list[torch.Tensor] = []
        self._pending: deque[tuple[int, int, Fetched]] = deque()
        self._reported: set[str] = set()

    def attach(self, state: TrackedState) -> None:
        """Test the weights of the tracked modules from now on."""
        self._weights, self._probes, self._trained, self._known = [], [], [], None
        by_optimizers = {
            id(each) for optimizer in state.optimizers for group in optimizer.param_groups for each in group["params"]
        }
        for module in state.modules:
            pairs = [(_local(each), id(each) in by_optimizers) for each in module.parameters() if each.requires_grad]
            weights = [weight for weight, _ in pairs if weight.numel()]
            self._weights += weights
            if weights:
                trained = [weight for weight, by_optimizer in pairs if by_optimizer and weight.numel()]
                probe = min(trained or weights, key=torch.Tensor.numel)  # the sum of its numbers costs least
                if trained:
                    self._trained.append(len(self._probes))
                self._probes.append(torch.view_as_real(probe) if probe.is_complex() else probe)
        # A scaled loss may overflow by design: the scaler then leaves the step out, and the weights stay finite.
        self._watches_loss = not state.scales_gradients

    def observe(self, loss: torch.Tensor) -> None:
        """Take the loss of a backward pass, of one element, into account."""
        if self._watches_loss:
            self._losses.append(loss.detach())

    def end_step(self, step: int) -> None:
        """Test what the step has computed, and respond to what the device has computed so far.

        Raises:
            NonFiniteError: a step was not finite, and the policy ends the run.
            RollbackRequired: the weights are not finite, and the policy restarts the run.
        """
        losses, self._losses = self._losses, []
        self.note_weights()
        numbers = [*losses, *(self._known or ())]
        if not numbers:
            return
        device = device_of(numbers[0].device)
        if not device.runs_behind:  # no copies: of a step of 10 ms they would take half a percent
            self._respond(step, len(losses), numbers)
            return
        fetched = device.fetch(torch.stack([each.reshape(()).double() for each in numbers]))  # (losses + probes,)
        self._pending.append((step, len(losses), fetched))
        while self._pending:
            number, count, values = self._pending[0]
            if not values.arrived() and len(self._pending) <= _MOST_PENDING:
                break  # those behind it arrive later, in the order of the device's queue
            self._pending.popleft()
            self._respond(number, count, values.read().tolist())

    def note_weights(self) -> None:
        """Note that the weights are those from which a run may continue, whatever has changed them."""
        if self._probes:
            self._known = self._sums(range(len(self._probes)))

    def forget_weights(self) -> None:
        """Note that the weights are about to be replaced."""
        self._known = None

    def weights_are_sound(self) -> bool:
        """Return whether this process may pass its weights on to the next round. Waits for the device."""
        with torch.no_grad():
            if self._policy != "warn" and not all(bool(torch.isfinite(each).all()) for each in self._probes):
                return False
        if self._known is None or not self._trained:
            return True
        # Bit by bit: the same kernel has added the same numbers up. NaN, which "warn" lets pass, equals NaN.
        pairs = zip(self._sums(self._trained), [self._known[index] for index in self._trained], strict=True)
        same = all(bool(torch.isclose(now, then, rtol=0, atol=0, equal_nan=True)) for now, then in pairs)
        if not same and "changed" not in self._reported:
            self._reported.add("changed")
            _LOG.warning(
                "The round ended while the weights of this process were not those of a completed step: something other "
                "than an optimizer's step() has changed them, such as an exchange for their moving average. They are "
                "not handed over; the run continues from another process's, or from the last snapshot."
            )
        return same

    def _sums(self, probes: Sequence[int]) -> list[torch.Tensor]:
        """Return the sum of each of these probes, float64 (): finite where all terms are, in a fifth of that time."""
        with torch.no_grad():
            return [self._probes[index].sum(dtype=torch.float64) for index in probes]

    def weights_are_finite(self) -> bool:
        """Return whether all weights of this rank are finite. Waits for the device."""
        if not self._weights:
            return True
        with torch.no_grad():
            # One kernel for many weights, and one wait for the device; NaN is the maximum where there is one.
            largest = torch._foreach_norm(self._weights, float("inf"))  # noqa: SLF001 - what clip_grad_norm_ uses
            return bool(torch.isfinite(torch.stack([each.float() for each in largest])).all())

    def _respond(self, step: int, losses: int, numbers: Sequence[float | torch.Tensor]) -> None:
        if all(map(math.isfinite, numbers)):
            return
        weights = not all(map(math.isfinite, numbers[losses:]))
        what = "weights" if weights else "loss"
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
