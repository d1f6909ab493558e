"""How often to save: the interval that costs a run the least."""

from __future__ import annotations

import math

__all__ = ["optimal_interval"]


def optimal_interval(cost: float, between_losses: float) -> float:
    """Return the time to train between two checkpoints.

    Seldom checkpoints are lost work when a loss comes, frequent ones are work that is not done. From J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37, whose first term is
    J. W. Young's (1974).

    Args:
        cost: of a checkpoint, in seconds of training.
        between_losses: mean seconds from one loss to the next.

    Returns:
        Seconds.
    """
    ratio = cost / (2 * between_losses)
    if ratio >= 1:
        return between_losses
    return math.sqrt(2 * cost * between_losses) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
