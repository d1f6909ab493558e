"""The factor between a step's learning rate and the script's, as pure functions.

Under a fixed batch per worker a step trains ``k`` times the samples of the reference. The target factor is ``k``
(Goyal et al., 2017), its square root, AdaScale's gain, or 1. Where it rises, it rises linearly from the factor that is
applied, over T steps: with momentum ``u' = mu u + g``, ``w' = w - gamma eta u'``, the buffer still holds the noise of
small batches, which a rate ``k`` times as large would apply with ``k**2`` times the variance (Lin et al., "Dynamic
Mini-batch SGD for Elastic Distributed Training", arXiv 1904.12043). T grows with the horizon of the momentum:
``0.8 * ratio / (1 - mu)``. Where it falls, it falls at once: a rate that is too large for its batch diverges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from typing_extensions import Self

from azureml_elastic.config import FixedPerWorkerBatch, Ramp
from azureml_elastic.train.optim.gradient_noise import GradientNoiseScale

__all__ = ["Scale", "adam_betas", "ramp_steps", "target"]

_RAMP_PER_HORIZON = 0.8
"""Measured: the noise that the buffer holds is forgotten, and no step is wasted."""

_NO_NOISE = GradientNoiseScale()


@dataclass(frozen=True)
class Scale:
    """The current factor, and the ramp to the target factor.

    Args:
        world_size: world size of the target factor
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
        """Return the state at another world size, and the factor for momentum buffers; ``momentum`` may be 0."""
        if world_size == self.world_size:
            return self, 1.0
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
    """Return the number of steps of a rise by a ratio, with the momentum of the optimizer, 0 without one."""
    if ramp.steps != "auto":
        return ramp.steps
    if not 0 < momentum < 1:
        return 0
    return math.ceil(round(_RAMP_PER_HORIZON * ratio / (1 - momentum), 6))  # 1 - 0.9 is a little less than 0.1


def target(policy: FixedPerWorkerBatch, world_size: int, noise: GradientNoiseScale = _NO_NOISE) -> float:
    """Return the factor that a policy requires at a world size after all ramps; AdaScale's follows from the noise."""
    k = world_size / policy.reference_world_size
    gain = noise.gain(policy.reference_world_size, world_size)
    factor = {"linear": k, "sqrt": math.sqrt(k), "adascale": gain, "none": 1.0}[policy.scaling]
    return factor if policy.max_scale is None else min(factor, policy.max_scale)


def adam_betas(k: float, betas: tuple[float, ...], epsilon: float) -> tuple[tuple[float, ...], float]:
    """Return Adam's betas and epsilon for a batch ``k`` times as large (Malladi et al., 2022, definition 5)."""
    return tuple(max(0.0, 1 - k * (1 - beta)) for beta in betas), epsilon / math.sqrt(k)
