"""The learning rate of each step, changed for the length of that step only.

Schedulers and checkpoints see the script's own rates: a hook before ``optimizer.step()`` multiplies them and one after
it restores them. The hooks count nothing, because an optimizer may step several times for one step of the run
(DeepSpeed's do, once for each group of parameters), or not at all (under a ``GradScaler``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from azureml_elastic.checkpoint.state.zero_redundancy import is_zero_redundancy
from azureml_elastic.config import BatchPolicy, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.position import Position, Window
from azureml_elastic.train.data.sampling import DataSpec, LoaderSpec
from azureml_elastic.train.optim.scaling import Scale, adam_betas
from azureml_elastic.train.step_state import StepMachine

__all__ = ["LearningRate"]


class LearningRate:
    """The learning rate factor of all tracked optimizers in the steps of a process."""

    def __init__(self, policy: BatchPolicy, position: Position, steps: StepMachine) -> None:
        self._policy = policy if isinstance(policy, FixedPerWorkerBatch) else None
        self._position = position
        self._steps = steps
        self._hooked: list[_HookedOptimizer] = []
        self._scale: Scale | None = None
        self._progress = 0.0  # of schedules, in steps of the reference

    @property
    def factor(self) -> float:
        """Factor of the current step."""
        return 1.0 if self._policy is None or self._scale is None else self._scale.factor(self._policy)

    @property
    def measures_noise(self) -> bool:
        """Whether the factor depends on the noise of the gradients, see :meth:`observe`."""
        return self._policy is not None and self._policy.scaling == "adascale"

    def attach(self, optimizers: list[Optimizer]) -> None:
        """Register the hooks of optimizers, which must have the settings that the policy changes."""
        for optimizer in optimizers:
            if self._policy is not None:
                _require_fitting(self._policy, optimizer)
            self._hooked.append(_HookedOptimizer(optimizer, self._before_step))

    def begin(self) -> None:
        """Restore the rates that a failed step has left changed. Called before each step."""
        for each in self._hooked:
            each.restore()

    def enter(self, world_size: int) -> None:
        """Change the world size to that of the round, after the state is restored."""
        if self._policy is None:
            return
        if self._scale is None:
            # A run that begins has no momentum to wait for; under another policy it has trained at a factor of 1.
            self._scale = Scale(self._policy.reference_world_size if self._progress else world_size)
        self._scale, shrink = self._scale.enter(self._policy, world_size, self._momentum())
        if shrink != 1.0:
            for each in self._hooked:
                each.shrink_momentum(shrink)

    def observe(self, local: float, mean: float, **sizes: int) -> None:
        """Measure the noise of a step's gradients before the optimizer steps, see :class:`GradientNoiseScale`."""
        assert self._scale is not None
        self._scale = replace(self._scale, noise=self._scale.noise.observe(local, mean, **sizes))

    def steps_of(self, window: Window | None) -> int:
        """Return by how many steps a schedule advances with the current step, given the first loader's window."""
        return math.floor(self._progress + self._advance_of(window)) - math.floor(self._progress)

    def commit(self, window: Window | None) -> None:
        """Count a completed step, see :meth:`steps_of`."""
        self._progress += self._advance_of(window)
        if self._scale is not None:
            self._scale = self._scale.advance()

    def to_json(self) -> dict[str, Any]:
        """Return the state, to be saved with a checkpoint."""
        return {"progress": self._progress, "scale": None if self._scale is None else self._scale.to_json()}

    def load(self, document: dict[str, Any] | None) -> None:
        """Restore a saved state, ``None`` for the beginning; a run may have begun under another policy."""
        self._progress = 0.0 if document is None else float(document["progress"])
        scale = None if document is None else document["scale"]
        self._scale = None if self._policy is None or scale is None else Scale.from_json(scale)

    def _advance_of(self, window: Window | None) -> float:
        first = self._position.first
        if first is None:
            return 1  # the script has a loader of its own, whose samples are not counted
        if window is None:
            return 0
        if self._policy is None:
            return 1
        if self.measures_noise:
            assert self._scale is not None
            return self._scale.noise.gain(self._policy.reference_world_size, self._scale.world_size)
        return _steps_at(first.spec, window.after.consumed) - _steps_at(first.spec, window.before.consumed)

    def _momentum(self) -> float:
        groups = [group for each in self._hooked for group in each.optimizer.param_groups]
        momenta = [(group.get("momentum", 0.0), group.get("betas", (0.0,))[0]) for group in groups]
        return max((float(value) for pair in momenta for value in pair), default=0.0)

    def _before_step(self, optimizer: Optimizer) -> tuple[float, float | None]:
        if self._steps.discarded:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        elif self._position.accumulating and _changes_weights(optimizer):
            self._position.require_whole()
        if self._policy is None or self._scale is None:
            return 1.0, None
        k = self._scale.world_size / self._policy.reference_world_size
        return self._scale.factor(self._policy), k if self._policy.scale_betas else None


class _HookedOptimizer:
    """The hooks around an optimizer's steps; ``before_step`` returns the factor, and the ratio for betas if any."""

    def __init__(self, optimizer: Optimizer, before_step: Callable[[Optimizer], tuple[float, float | None]]) -> None:
        self.optimizer = optimizer
        self._before_step = before_step
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []
        optimizer.register_step_pre_hook(lambda *_: self._apply())
        optimizer.register_step_post_hook(lambda *_: self.restore())

    def restore(self) -> None:
        """Revert the changes of the hook before the step, except for values that were changed since."""
        for group, key, original, applied in self._changed:
            if isinstance(applied, torch.Tensor):
                if isinstance(group[key], torch.Tensor):  # without waiting for a GPU
                    group[key].copy_(torch.where(group[key] == applied, original, group[key]))
            elif not isinstance(group[key], torch.Tensor) and group[key] == applied:
                group[key] = original
        self._changed.clear()

    def shrink_momentum(self, factor: float) -> None:
        """Multiply SGD's momentum buffers."""
        owner: Any = self.optimizer
        for state in (owner.optim if is_zero_redundancy(owner) else owner).state.values():
            if isinstance(state.get("momentum_buffer"), torch.Tensor):
                state["momentum_buffer"].mul_(factor)

    def _apply(self) -> None:
        self.restore()  # the hook after the step is not called if a closure raises
        factor, k = self._before_step(self.optimizer)
        scaled: list[torch.Tensor] = []  # groups may share a tensor that was given to the optimizer, not to a group
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if factor != 1.0 and not any(rate is each for each in scaled):
                self._set(group, "lr", rate * factor)
                if isinstance(rate, torch.Tensor):
                    scaled.append(rate)
            if k is not None and k != 1.0 and "betas" in group:
                betas, epsilon = adam_betas(k, tuple(map(float, group["betas"])), group["eps"])
                self._set(group, "betas", betas)
                self._set(group, "eps", epsilon)

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        if isinstance(group[key], torch.Tensor):
            original = group[key].clone()
            group[key].copy_(value)  # a fused or captured step has the tensor itself
            value = group[key].clone()
        else:
            original, group[key] = group[key], value
        self._changed.append((group, key, original, value))


def _changes_weights(optimizer: Optimizer) -> bool:
    """Return whether a step may change weights: reading a new optimizer's state makes it step at a rate of 0."""
    return any(float(group["lr"]) for group in optimizer.param_groups)


def _require_fitting(policy: FixedPerWorkerBatch, optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if policy.momentum == "rescale" and not all("momentum" in group for group in optimizer.param_groups):
        raise UsageError(f'momentum="rescale" divides the momentum buffers of SGD, which {kind} has not. Take Ramp().')
    if policy.scale_betas and not all({"betas", "eps"} <= group.keys() for group in optimizer.param_groups):
        raise UsageError(f"scale_betas=True needs betas and eps, which {kind} has not. Leave it out.")


def _steps_at(spec: LoaderSpec, consumed: int) -> int:
    """Return the number of reference steps in the first samples of an epoch; the epoch's last step may be smaller."""
    if isinstance(spec, DataSpec):
        return spec.windows if consumed >= spec.usable else consumed // spec.global_batch_size
    return -(-consumed // spec.global_batch_size)  # the length of an epoch of shards is not known beforehand
