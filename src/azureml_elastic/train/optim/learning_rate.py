"""The learning rate of each step, changed for the length of that step only, and schedules that count samples.

Schedulers and checkpoints see the script's own rates: a hook before ``optimizer.step()`` multiplies them and one after
it restores them. The hooks count nothing, because an optimizer may step several times for one step of the run
(DeepSpeed's do, once for each group of parameters), or not at all (under a ``GradScaler``).

Under a fixed batch per worker a step trains ``k`` times the samples of the reference. The target factor is ``k``
(Goyal et al., 2017), its square root, AdaScale's gain, or 1. Where it rises, it rises linearly from the factor that is
applied, over T steps: with momentum ``u' = mu u + g``, ``w' = w - gamma eta u'``, the buffer still holds the noise of
small batches, which a rate ``k`` times as large would apply with ``k**2`` times the variance (Lin et al., "Dynamic
Mini-batch SGD for Elastic Distributed Training", arXiv 1904.12043). T grows with the horizon of the momentum:
``0.8 * ratio / (1 - mu)``. Where it falls, it falls at once: a rate that is too large for its batch diverges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import Self

from azureml_elastic.checkpoint.state.tracked import unwrap_scheduler
from azureml_elastic.checkpoint.state.tracked_state import TrackedState, is_zero_redundancy
from azureml_elastic.config import BatchPolicy, FixedPerWorkerBatch, Ramp
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.position import Position, Window
from azureml_elastic.train.data.sampling import DataSpec, LoaderSpec
from azureml_elastic.train.step_state import StepMachine

_LEAST = 1e-6
"""The paper's limit for a variance that is estimated as zero."""

_RAMP_PER_HORIZON = 0.8
"""Measured: the noise that the buffer holds is forgotten, and no step is wasted."""


@dataclass(frozen=True)
class GradientNoiseScale:
    """Running estimates of the noise of gradients, and the gain of a larger batch: AdaScale.

    T. Johnson, P. Agrawal, H. Gu, C. Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training" (ICML
    2020). With the variance v of one sample's gradient and the squared norm m of the expected gradient, a step on N
    samples gains ``(v / G + m) / (v / N + m)`` steps on G samples: 1 without noise, N / G with nothing but noise.

    For micro-batches of b_i samples, N together, with mean gradients g_i and their weighted mean g::

        E[sum b_i/N |g_i|^2] = m + S v / N        (S micro-batches)
        E[|g|^2]             = m + v / N

    so that ``v = N (sum b_i/N |g_i|^2 - |g|^2) / (S - 1)`` and ``m = |g|^2 - v / N``, also for uneven micro-batches.

    Args:
        moments: variance in units of the reference batch, squared norm, and weight of both; empty before the first step
    """

    moments: tuple[float, ...] = ()

    def observe(
        self, local: float, mean: float, *, micro_batches: int, count: int, reference: int
    ) -> GradientNoiseScale:
        """Return the estimates after another step; gradients that overflow are skipped.

        Args:
            local: the sum of ``b_i/N |g_i|^2`` over the micro-batches of all ranks
            mean: ``|g|^2``, of the gradient that the optimizer applies
            micro_batches: S, of all ranks; a step with fewer than two is skipped
            count: N, samples of the step
            reference: G, samples of a step of the reference
        """
        if micro_batches < 2 or not (math.isfinite(local) and math.isfinite(mean)):  # noqa: PLR2004 - a variance needs two
            return self
        sample_variance = max(count * (local - mean) / (micro_batches - 1), 0.0)
        keep = max(1 - micro_batches / 1000, 0.0)  # the paper's
        observed = (sample_variance / reference, max(mean - sample_variance / count, 0.0), 1.0)
        before = self.moments or (0.0, 0.0, 0.0)
        return GradientNoiseScale(
            tuple(keep * old + (1 - keep) * new for old, new in zip(before, observed, strict=True))
        )

    def gain(self, reference_world_size: int, world_size: int) -> float:
        """Return the number of reference steps that one step at a world size replaces, between 1 and their ratio."""
        k = world_size / reference_world_size
        if not self.moments or k <= 1:
            return min(k, 1.0)
        variance, squared = max(self.moments[0] / self.moments[2], _LEAST), self.moments[1] / self.moments[2]
        return min(max((variance + squared) / (variance / k + squared), 1.0), k)  # despite rounding


_NO_NOISE = GradientNoiseScale()


@dataclass(frozen=True)
class Scale:
    """The current factor of the learning rate, relative to the script's, and the ramp to the target factor.

    Args:
        world_size: number of ranks of the target factor
        start: factor at which the ramp began
        elapsed: steps of the ramp that are completed
        steps: number of steps of the whole ramp
        noise: estimates of AdaScale
    """

    world_size: int
    start: float = 1.0
    elapsed: int = 0
    steps: int = 0
    noise: GradientNoiseScale = _NO_NOISE

    def factor(self, policy: FixedPerWorkerBatch) -> float:
        """Return the factor of the current step."""
        wanted = target(policy, self.world_size, self.noise)
        if self.elapsed >= self.steps or wanted <= self.start:
            return wanted
        return self.start + (wanted - self.start) * self.elapsed / self.steps

    def enter(self, policy: FixedPerWorkerBatch, world_size: int, momentum: float) -> tuple[Self, float]:
        """Return the state at another world size, and the factor for momentum buffers; ``momentum`` may be 0.

        The second keeps ``gamma eta u``, what the buffer adds to the weights, as it was.
        """
        if world_size == self.world_size:
            return self, 1.0
        # From the factor of this moment: where another change comes within a ramp, the rate makes no jump.
        now, wanted = self.factor(policy), target(policy, world_size, self.noise)
        moved = replace(self, world_size=world_size, start=now, elapsed=0, steps=0)
        if wanted <= now:
            return moved, 1.0
        if isinstance(policy.momentum, Ramp):
            return replace(moved, steps=ramp_steps(policy.momentum, wanted / now, momentum)), 1.0
        return moved, now / wanted if policy.momentum == "rescale" else 1.0

    def advance(self) -> Self:
        """Return the state after a completed step."""
        return replace(self, elapsed=min(self.elapsed + 1, self.steps))

    def to_json(self) -> dict[str, Any]:
        """Return the fields, to be saved with a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the inverse of :meth:`to_json`."""
        return cls(**{**document, "noise": GradientNoiseScale(tuple(document["noise"]["moments"]))})


def ramp_steps(ramp: Ramp, ratio: float, momentum: float) -> int:
    """Return the number of optimizer steps of a rise by a ratio, with the momentum of the optimizer, 0 without one."""
    if ramp.steps != "auto":
        return ramp.steps
    if not 0 < momentum < 1:
        return 0
    return math.ceil(round(_RAMP_PER_HORIZON * ratio / (1 - momentum), 6))  # 1 - 0.9 is a little less than 0.1


def target(policy: FixedPerWorkerBatch, world_size: int, noise: GradientNoiseScale = _NO_NOISE) -> float:
    """Return the factor that a policy requires at a world size after all ramps; AdaScale's follows from the noise.

    Linear: P. Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677). Square root: A. Krizhevsky, "One weird
    trick for parallelizing convolutional neural networks" (arXiv 1404.5997).
    """
    k = world_size / policy.reference_world_size
    gain = noise.gain(policy.reference_world_size, world_size)
    factor = {"linear": k, "sqrt": math.sqrt(k), "adascale": gain, "none": 1.0}[policy.scaling]
    return factor if policy.max_scale is None else min(factor, policy.max_scale)


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
            rescales, kind = self._policy is not None and self._policy.momentum == "rescale", type(optimizer).__name__
            if rescales and not all("momentum" in group for group in optimizer.param_groups):
                what = "divides the momentum buffers of SGD"
                raise UsageError(f'momentum="rescale" {what}, which {kind} has not. Take Ramp().')
            self._hooked.append(_HookedOptimizer(optimizer, self._before_step))

    def begin(self) -> None:
        """Restore the rates that a failed step has left changed. Called before each step."""
        # Nothing else would: torch calls the hook behind a step only where the step has returned.
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
        # The difference of two floors: what is cut off from one step is made up for in a later one.
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
        return max((float(value) for pair in momenta for value in pair), default=0.0)  # one ramp for all groups

    def _before_step(self, optimizer: Optimizer) -> float:
        if self._steps.discarded:
            # torch's optimizers leave a parameter without a gradient alone: neither momentum nor decay changes it.
            # Here, as the script may have computed gradients since the step was discarded.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        elif self._position.accumulating and _changes_weights(optimizer):
            self._position.require_whole()
        if self._policy is None or self._scale is None:
            return 1.0
        return self._scale.factor(self._policy)


class _HookedOptimizer:
    """The hooks around an optimizer's steps; ``before_step`` returns the factor of the rate."""

    def __init__(self, optimizer: Optimizer, before_step: Callable[[Optimizer], float]) -> None:
        self.optimizer = optimizer
        self._before_step = before_step
        self._changed: list[tuple[dict[str, Any], Any, Any]] = []
        optimizer.register_step_pre_hook(lambda *_: self._apply())
        optimizer.register_step_post_hook(lambda *_: self.restore())

    def restore(self) -> None:
        """Revert the changes of the hook before the step, except for values that were changed since."""
        for group, original, applied in self._changed:
            rate = group["lr"]
            if isinstance(applied, torch.Tensor):
                if isinstance(rate, torch.Tensor):  # without waiting for a GPU
                    rate.copy_(torch.where(rate == applied, original, rate))
            elif not isinstance(rate, torch.Tensor) and rate == applied:
                group["lr"] = original
        self._changed.clear()

    def shrink_momentum(self, factor: float) -> None:
        """Multiply SGD's momentum buffers."""
        owner: Any = self.optimizer
        for state in (owner.optim if is_zero_redundancy(owner) else owner).state.values():
            if isinstance(state.get("momentum_buffer"), torch.Tensor):
                state["momentum_buffer"].mul_(factor)

    def _apply(self) -> None:
        self.restore()  # the hook after the step is not called if a closure raises
        factor = self._before_step(self.optimizer)
        if factor == 1.0:
            return
        scaled: list[torch.Tensor] = []  # groups may share a tensor that was given to the optimizer, not to a group
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if not isinstance(rate, torch.Tensor):
                group["lr"] = rate * factor
                self._changed.append((group, rate, group["lr"]))
            elif not any(rate is each for each in scaled):
                scaled.append(rate)
                original = rate.clone()  # (), on its device
                rate.mul_(factor)  # a fused or captured step has the tensor itself
                self._changed.append((group, original, rate.clone()))


def _changes_weights(optimizer: Optimizer) -> bool:
    """Return whether a step may change weights: reading a new optimizer's state makes it step at a rate of 0."""
    return any(float(group["lr"]) for group in optimizer.param_groups)


def _steps_at(spec: LoaderSpec, consumed: int) -> int:
    """Return the number of reference steps in the first samples of an epoch; the epoch's last step may be smaller."""
    if isinstance(spec, DataSpec):
        return spec.windows if consumed >= spec.usable else consumed // spec.global_batch_size
    return -(-consumed // spec.global_batch_size)  # the length of an epoch of shards is not known beforehand


class Schedule:
    """One of torch's schedulers, stepped as often as it would be at the reference world size.

    Where a step trains three times the samples of the reference, the scheduler advances by three steps. All attributes
    besides ``step()`` are those of the scheduler.

    Args:
        scheduler: scheduler of torch, or Accelerate's wrapper of one
        due: function that returns the number of reference steps of the current optimizer step, ``None`` outside of one

    Raises:
        UsageError: the scheduler follows a metric, not steps.
    """

    def __init__(self, scheduler: Any, due: Callable[[], int | None]) -> None:
        scheduler = unwrap_scheduler(scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau follows a metric, at any world size; step it yourself, without run.schedule()."
            )
        self._scheduler: LRScheduler = scheduler
        self._due = due

    def step(self) -> None:
        """Advance by the current optimizer step.

        Raises:
            UsageError: there is none.
        """
        steps = self._due()
        if steps is None:
            raise UsageError(
                "The schedule was stepped outside of an optimizer step. Call its step() between optimizer.step() and "
                "run.commit(); a scheduler that counts epochs needs no run.schedule()."
            )
        for _ in range(steps):
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler's state."""
        self._scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_scheduler"], name)


@dataclass(eq=False)
class ScheduleCheck:
    """Check that no tracked scheduler counts steps, because the number of samples of a step varies."""

    position: Position
    _counted: tuple[Any, list[int]] | None = field(default=None, init=False)

    def begin_step(self, tracked: TrackedState | None) -> None:
        """Count how often the schedulers were stepped, before the first step of an epoch or a round."""
        if self._counted is None or self._counted[0] != self._period:
            self._count(tracked)

    def end_step(self, tracked: TrackedState | None) -> None:
        """Raise ``UsageError`` if a scheduler was stepped since the step before, and not by :class:`Schedule`."""
        before = self._counted
        self._count(tracked)
        if before is None or self._counted is None or before[0] != self._counted[0] or tracked is None:
            return
        for scheduler, old, new in zip(tracked.schedulers, before[1], self._counted[1], strict=True):
            if old != new:
                raise UsageError(
                    f"{type(scheduler).__name__} was stepped with the optimizer, but the samples of a step depend "
                    "on the world size. Wrap it: scheduler = run.schedule(scheduler), and track that."
                )

    @property
    def _period(self) -> tuple[Any, int]:
        return self.position.epochs, self.position.generation

    def _count(self, tracked: TrackedState | None) -> None:
        if tracked is not None:
            self._counted = (self._period, [steps_of(scheduler) for scheduler in tracked.schedulers])


def steps_of(scheduler: Any) -> int:
    """Return how often one of torch's schedulers was stepped."""
    while not hasattr(scheduler, "last_epoch"):  # a chain is stepped as its parts are
        scheduler = scheduler._schedulers[0]  # noqa: SLF001
    return int(scheduler.last_epoch)
