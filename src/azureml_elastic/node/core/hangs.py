"""When a run that still lives no longer trains: how long is too long without a completed step.

Pure functions of what :class:`~azureml_elastic.node.hangs.detector.HangDetector` has seen. Three kinds of time are
distinguished, because a program that trains well has all three:

- a **step**: from one completed step to the next. A limit of ten times the typical one would take every evaluation for
  a hang, ten times the longest one would be useless after a single long evaluation, so it is the larger of ten times
  the *median* and twice the *longest*, and never below the floor::

      step_limit = max(floor, 10 * median(steps), 2 * longest(steps))

- a **pause**: from the start of a session to its first step (data cache, compilation), and what a session announces as
  such (an evaluation, a save). Its limit is longer and follows from its own kind::

      pause_limit = max(4 * floor, 2 * step_limit, 2 * longest(pauses))

- time that is **free**: what a session announces as bounded by something else. Nothing is learned from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.config import Plan

__all__ = ["Hang", "HangPolicy", "Phase", "pause_limit", "step_limit"]

_TYPICAL_FACTOR = 10.0
_LONGEST_FACTOR = 2.0
_PAUSE_FACTOR = 4.0

Phase = Literal["start", "step", "pause", "free"]


@dataclass(frozen=True)
class HangPolicy:
    """What the plan says.

    Args:
        enabled: whether anything is watched.
        fixed: seconds without a step; ``None`` learns them.
        floor: the smallest limit in seconds that is learned.
    """

    enabled: bool = True
    fixed: float | None = None
    floor: float = 300.0

    @classmethod
    def of(cls, plan: Plan) -> HangPolicy:
        """Return the policy of a plan."""
        floor = plan.health.hang_timeout_floor.total_seconds()
        timeout = None if plan.distribution.runs_engine else plan.health.hang_timeout  # an engine reports no steps
        if timeout is None or timeout == "auto":
            return cls(enabled=timeout is not None, floor=floor)
        return cls(fixed=timeout.total_seconds(), floor=floor)


@dataclass(frozen=True)
class Hang:
    """A verdict.

    Args:
        step: the last step that a local worker has completed, 0 before the first.
        waited: seconds since then.
        limit: seconds that were allowed.
        phase: what the workers were doing, as far as is known.
    """

    step: int
    waited: float
    limit: float
    phase: Phase

    @property
    def reason(self) -> str:
        """Why the round ends."""
        what = f"no step after step {self.step}" if self.phase != "start" else "no first step of the round"
        pause = ", which a worker had announced to be busy," if self.phase == "pause" else ""
        return f"hang: {what}{pause} for {self.waited:.1f} s (limit {self.limit:.1f} s)"


def step_limit(policy: HangPolicy, steps: Collection[float], longest: float = 0.0) -> float:
    """Return for how long there may be no step once there was one.

    Args:
        steps: times between two completed steps, seconds, in any order; of many, the newest.
        longest: longest step so far, seconds.

    Returns:
        Seconds. It is a fixed policy's own, and else at least twice the longest time seen.
    """
    if policy.fixed is not None:
        return policy.fixed
    if not steps:
        return max(policy.floor, _LONGEST_FACTOR * longest)
    typical = statistics.median_low(steps)  # of a step and an evaluation, it is the step
    return max(policy.floor, _TYPICAL_FACTOR * typical, _LONGEST_FACTOR * max(longest, *steps))


def pause_limit(policy: HangPolicy, step_seconds: float, longest: float = 0.0) -> float:
    """Return for how long there may be no step before the first one, and in an announced pause.

    Args:
        step_seconds: the limit between steps.
        longest: the longest pause or start so far, seconds.
    """
    minimum = _PAUSE_FACTOR * max(policy.floor, policy.fixed or 0.0)
    return max(minimum, _LONGEST_FACTOR * step_seconds, _LONGEST_FACTOR * longest)
