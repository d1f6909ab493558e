"""Synthetic traces: seeded losses of single machines, and events that reclaim many machines of a pool at once."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from azureml_elastic.errors import UsageError
from azureml_elastic.simulate.traces import Change, Trace

__all__ = ["Hazard", "synthetic_trace"]


@dataclass(frozen=True)
class Hazard:
    """Rates at which the machines of a pool are lost and come back. All times are exponentially distributed.

    Args:
        loss_every: mean seconds between two losses of one machine, independent of the others; infinite for none.
        back_after: mean seconds until such a machine is available again.
        reclaim_every: mean seconds between two events that reclaim machines of the whole pool; infinite for none.
        reclaim_share: probability with which each machine is reclaimed by such an event.
        reclaim_lasts: mean seconds until the machines of one event are available again, all at the same time.
    """

    loss_every: float = math.inf
    back_after: float = 1200.0
    reclaim_every: float = math.inf
    reclaim_share: float = 0.5
    reclaim_lasts: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("loss_every", "back_after", "reclaim_every", "reclaim_lasts"):
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise UsageError(f"{name}={value} of the hazard is not above 0; give a number of seconds.")
        if not 0 <= self.reclaim_share <= 1:
            raise UsageError(f"reclaim_share={self.reclaim_share} of the hazard is not within 0 and 1.")


def synthetic_trace(hazard: Hazard, machines: int, seconds: float, seed: int = 0) -> Trace:
    """Return a trace in which all machines are available at first. Equal arguments give equal traces.

    Args:
        hazard: rates of the losses.
        machines: number of machines.
        seconds: length of the trace.
        seed: start value of the random numbers.
    """
    if machines < 1 or not 0 < seconds < math.inf:
        raise UsageError(f"A trace of {machines} machines and {seconds:g} s is empty; give 1 machine and 1 s or more.")
    # A machine's losses and the pool's events have generators of their own: one more machine changes no other's.
    pool = random.Random(f"{seed} pool")
    draws = [random.Random(f"{seed} {machine}") for machine in range(machines)]
    gaps: list[list[tuple[float, float]]] = [_own_losses(hazard, draw, seconds) for draw in draws]
    choices = [random.Random(f"{seed} {machine} reclaimed") for machine in range(machines)]
    time = _after(pool, hazard.reclaim_every)
    while time < seconds:
        until = time + _after(pool, hazard.reclaim_lasts)
        for machine, choice in enumerate(choices):
            if choice.random() < hazard.reclaim_share:
                gaps[machine].append((time, until))
        time += _after(pool, hazard.reclaim_every)
    changes = [Change(0.0, machine, True) for machine in range(machines)]
    for machine, periods in enumerate(gaps):
        for start, end in _union(periods):
            changes.append(Change(start, machine, False))
            if end < seconds:
                changes.append(Change(end, machine, True))
    return Trace(tuple(sorted(changes)), machines, seconds)


def _after(draw: random.Random, mean: float) -> float:
    return math.inf if math.isinf(mean) else draw.expovariate(1 / mean)


def _own_losses(hazard: Hazard, draw: random.Random, seconds: float) -> list[tuple[float, float]]:
    periods: list[tuple[float, float]] = []
    time = _after(draw, hazard.loss_every)
    while time < seconds:
        back = time + _after(draw, hazard.back_after)
        periods.append((time, back))
        time = back + _after(draw, hazard.loss_every)
    return periods


def _union(periods: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the periods in the order of time, with overlapping ones as one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(periods):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
