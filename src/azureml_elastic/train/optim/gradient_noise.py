"""The noise of gradients, and the gain of a larger batch: AdaScale.

T. Johnson, P. Agrawal, H. Gu, C. Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training" (ICML
2020). With the variance v of one sample's gradient and the squared norm m of the expected gradient, a step on N samples
gains ``(v / G + m) / (v / N + m)`` steps on G samples: 1 without noise, N / G with nothing but noise.

For micro-batches of b_i samples, N together, with mean gradients g_i and their weighted mean g::

    E[sum b_i/N |g_i|^2] = m + S v / N        (S micro-batches)
    E[|g|^2]             = m + v / N

so that ``v = N (sum b_i/N |g_i|^2 - |g|^2) / (S - 1)`` and ``m = |g|^2 - v / N``, also for uneven micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GradientNoiseScale"]

_LEAST = 1e-6
"""The paper's limit for a variance that is estimated as zero."""


@dataclass(frozen=True)
class GradientNoiseScale:
    """Running estimates.

    Args:
        moments: variance in units of the reference batch, squared norm, and weight of both; empty before the first step
    """

    moments: tuple[float, ...] = ()

    def observe(
        self, local: float, mean: float, *, micro_batches: int, count: int, reference: int
    ) -> GradientNoiseScale:
        """Return the estimates after another step; gradients that overflow are skipped.

        Args:
            local: the sum of ``b_i/N |g_i|^2``
            mean: ``|g|^2``
            micro_batches: S; a step with fewer than two is skipped
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
