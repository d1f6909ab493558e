"""When a run that still lives no longer trains: how long is too long without a completed step, and what follows.

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

**From the verdict "it hangs" to the end of the round: all nodes write down their workers' stacks first.** Rank 0's
agent decides, and broadcasts that. Every agent collects the stacks of its own workers and reports when it has them.
When all have, or after a few seconds, rank 0's agent ends the round. An agent whose own verdict comes, much later,
although rank 0's has not, does so alone: what hangs may be that agent.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from azureml_elastic.config import Plan
from azureml_elastic.ipc.agent_messages import Dumped, DumpStacks
from azureml_elastic.node.core.actions import (
    AdoptVerdict,
    RecordHang,
    ToLeader,
    ToMembers,
    TrainingAction,
    WriteStacks,
)
from azureml_elastic.node.core.events import Hang, Hung
from azureml_elastic.node.core.round import Round

_TYPICAL_FACTOR = 10.0
_LONGEST_FACTOR = 2.0
_PAUSE_FACTOR = 4.0


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
        timeout = None if plan.distribution.runs_engine else plan.health.hang_timeout  # an engine reports no steps
        if timeout is None or timeout == "auto":
            return cls(enabled=timeout is not None)
        return cls(fixed=timeout.total_seconds())


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


_ANSWER_SECONDS = 5.0
"""For all nodes to collect their stacks; twice what one may take."""


class HangResponse:
    """One agent's part in one round.

    Attributes:
        until: monotonic seconds at which this agent ends the round at the latest, ``None`` where it does not.
    """

    def __init__(self, round_: Round, node: str) -> None:
        self._number = round_.number
        self._members = [member.node for member in round_.members]
        self._node = node
        self._hung: Hung | None = None
        self._known = False
        self._missing: set[str] = set()
        self.until: float | None = None

    def decided(self, hung: Hung, now: float) -> list[TrainingAction]:
        """This agent's detector has given its verdict."""
        if self._known:
            return []
        self._known, self._hung, self.until = True, hung, now + _ANSWER_SECONDS
        leads = self._members[0] == self._node
        # All nodes report to rank 0. Another one that decides knows of its own stacks alone.
        self._missing = set(self._members) if leads else {self._node}
        hang = hung.hang
        actions: list[TrainingAction] = [RecordHang(hang), WriteStacks(hang)]
        if leads:
            actions.append(ToMembers(DumpStacks(self._number, hang.step, hang.waited, hang.limit, hang.phase)))
        return actions

    def received(self, message: DumpStacks) -> list[TrainingAction]:
        """Rank 0's agent has broadcast its verdict."""
        # The broadcast may be a late one, of the round before.
        if self._known or message.round != self._number:
            return []
        self._known = True
        hang = Hang(message.step, message.waited, message.limit, message.phase)
        return [AdoptVerdict(hang), WriteStacks(hang)]

    def written(self) -> list[TrainingAction]:
        """The stacks of this node's workers are written."""
        self._missing.discard(self._node)
        return [] if self._hung is not None else [ToLeader(Dumped())]

    def dumped(self, node: str) -> None:
        """A node has written its stacks; for rank 0's agent."""
        self._missing.discard(node)

    def due(self, now: float) -> Hung | None:
        """Return the verdict for which this agent must end the round now: all stacks that can be had are written."""
        over = not self._missing or (self.until is not None and now >= self.until)
        return self._hung if over else None
