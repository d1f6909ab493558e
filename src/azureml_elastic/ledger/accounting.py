"""Accounting of the nodes' time: each second of each node has one activity. Pure functions of the events.

The times of one node are compared with each other, never with those of another node, with one exception: while a node
waits outside of the rounds, the others' events decide whether it waits for the minimum or is a spare.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    Event,
    HangDetected,
    NodeLeft,
    NodeReady,
    NodeStarted,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.samples import restored_steps, steps_undone, surviving_steps
from azureml_elastic.ledger.timeline import UnreportedRound, UnreportedWork

__all__ = [
    "Activity",
    "Cause",
    "NodeTime",
    "Span",
    "Total",
    "account",
    "goodput",
    "highest_goodput",
    "lost_steps",
    "node_times",
    "totals",
]

Activity = Literal["starting", "waiting", "training", "saving", "recovering", "lost work", "unknown", "idle"]
"""What a node does: ``waiting`` is for the minimum of nodes, ``lost work`` is trained again later, ``idle`` is a spare
or after the end of the run. ``unknown`` is the work of a script without a session of which nobody can tell whether it
was kept."""

Cause = Literal["preemption", "node loss", "worker crash", "scale-up", "hang", "connection"]
"""Why the round ended from which a node recovers; ``scale-up`` is every other change at a step boundary."""


@dataclass(frozen=True)
class NodeTime:
    """Lifetime of a node's process in seconds since the epoch, by the node's clock; of a running one until now."""

    began: float
    ended: float
    running: bool = False

    @property
    def seconds(self) -> float:
        """Wall time of the node."""
        return max(0.0, self.ended - self.began)


@dataclass(frozen=True)
class Span:
    """A time span of one node with one activity.

    Args:
        started: seconds since the epoch.
        ended: seconds since the epoch.
        round: round of the node, 0 before its first.
        cause: why it was recovering, or why its work was lost; ``None`` for other activities.
    """

    node: str
    activity: Activity
    started: float
    ended: float
    round: int = 0
    cause: Cause | None = None

    @property
    def seconds(self) -> float:
        """Duration of the span."""
        return self.ended - self.started


@dataclass(frozen=True)
class Total:
    """Seconds of all nodes with one activity and cause."""

    activity: Activity
    cause: Cause | None
    seconds: float


def node_times(events: Iterable[Event]) -> dict[str, NodeTime]:
    """Return the lifetimes of the nodes as far as they have recorded them: up to the last event of a killed node."""
    found: dict[str, NodeTime] = {}
    for event in events:
        began = event.began if isinstance(event, NodeStarted) and event.began is not None else event.time
        known = found.get(event.node, NodeTime(began, event.time))
        found[event.node] = NodeTime(min(known.began, began), max(known.ended, event.time))
    return found


def account(events: Sequence[Event], times: Mapping[str, NodeTime] | None = None) -> list[Span]:
    """Return the spans of all nodes; those of one node follow each other without a gap over its whole lifetime.

    Args:
        times: lifetimes of nodes that are known better than by their events, such as those of killed nodes.
    """
    run = _Run.of(events)
    lifetimes = {**node_times(events), **(times or {})}
    spans: list[Span] = []
    for node in sorted(run.events):
        line = _Line(node, lifetimes[node])
        _account_node(line, run)
        spans += line.spans
    return spans


def totals(spans: Iterable[Span]) -> list[Total]:
    """Return the seconds by activity and cause, the largest first."""
    sums: dict[tuple[Activity, Cause | None], float] = {}
    for span in spans:
        sums[span.activity, span.cause] = sums.get((span.activity, span.cause), 0.0) + span.seconds
    found = [Total(activity, cause, seconds) for (activity, cause), seconds in sums.items()]
    return sorted(found, key=lambda total: -total.seconds)


def goodput(found: Iterable[Total]) -> float | None:
    """Return the share of the nodes' time that is known to be training which was kept; ``None`` without time."""
    return _share(found, "training")


def highest_goodput(found: Iterable[Total]) -> float | None:
    """Return what the goodput would be if all unknown time was such training; ``None`` without time."""
    return _share(found, "training", "unknown")


def _share(found: Iterable[Total], *activities: Activity) -> float | None:
    found = list(found)
    whole = math.fsum(total.seconds for total in found)
    return math.fsum(total.seconds for total in found if total.activity in activities) / whole if whole else None


def lost_steps(events: Sequence[Event]) -> int:
    """Return the number of steps that were trained again, because a later round was restored from an earlier one."""
    return sum(steps_undone(events).values())


@dataclass
class _Line:
    """Spans of one node, drawn from the beginning to the end."""

    node: str
    time: NodeTime
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = self.time.began

    def draw(self, until: float, activity: Activity, number: int = 0, cause: Cause | None = None) -> None:
        """Continue with an activity; a time before the present or after the end of the node changes nothing."""
        until = min(until, self.time.ended)
        if until <= self.at:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.activity, last.round, last.cause) == (activity, number, cause):
            self.spans[-1] = Span(self.node, activity, last.started, until, number, cause)
        else:
            self.spans.append(Span(self.node, activity, self.at, until, number, cause))
        self.at = until


@dataclass(frozen=True)
class _Run:
    """What concerns the whole run.

    Args:
        events: events by node, in order.
        by_round: events by node and round, in order.
        entries: rounds that nodes have entered, with the times.
        sealed: time spans in which rounds ran, in order.
        restored: step with which training begins, by round.
        kept: last step of each round that no later round has trained again.
        reached: last step that a node has reported, by round.
        causes: why each round ended.
        commits: committed checkpoints by round.
        unreported: what is known of each round where no step was reported, as by a script without a session; empty
            otherwise.
        ended_in: round in which the run ended, ``None`` if it has not.
    """

    events: Mapping[str, list[Event]]
    by_round: Mapping[tuple[str, int], list[Event]]
    entries: list[tuple[int, float]]
    sealed: list[tuple[float, float]]
    restored: Mapping[int, int]
    kept: Mapping[int, float]
    reached: Mapping[int, int]
    causes: Mapping[int, Cause]
    commits: Mapping[int, list[CheckpointCommitted]]
    unreported: Mapping[int, UnreportedRound]
    ended_in: int | None

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Run:
        by_node: dict[str, list[Event]] = {}
        by_round: dict[int, list[Event]] = {}
        by_node_and_round: dict[tuple[str, int], list[Event]] = {}
        for event in sorted(events, key=lambda event: event.time):
            by_node.setdefault(event.node, []).append(event)
            by_round.setdefault(event.round, []).append(event)
            by_node_and_round.setdefault((event.node, event.round), []).append(event)
        restored = restored_steps(events)
        numbers = sorted(
            number for number, own in by_round.items() if any(isinstance(event, RoundEntered) for event in own)
        )
        sealed = []
        for number in numbers:
            own = by_round[number]
            started = min(event.time for event in own if isinstance(event, RoundEntered))
            closing = [event.time for event in own if isinstance(event, RoundReopened | RunEnded)]
            sealed.append((started, min(closing, default=max(event.time for event in own))))
        left = {event.node: event.reason for event in events if isinstance(event, NodeLeft)}
        ends = [event.round for event in events if isinstance(event, RunEnded)]
        reports_steps = any(isinstance(event, Progress | Restored) for event in events)
        return cls(
            by_node,
            by_node_and_round,
            [(event.round, event.time) for event in events if isinstance(event, RoundEntered)],
            sealed,
            restored,
            surviving_steps(restored, numbers),
            {
                number: max((event.step for event in by_round[number] if isinstance(event, Progress)), default=0)
                for number in numbers
            },
            {number: _cause(by_round[number], left) for number in numbers},
            {
                number: [event for event in own if isinstance(event, CheckpointCommitted)]
                for number, own in by_round.items()
            },
            {} if reports_steps else {number: UnreportedRound.of(by_round[number]) for number in numbers},
            max(ends, default=None),
        )


def _cause(events: Sequence[Event], left: Mapping[str, str]) -> Cause:
    """Return why a round ended, by its events and the reasons with which nodes have left."""
    reopened = [event for event in events if isinstance(event, RoundReopened)]
    lost = {node for event in reopened for node in event.lost}
    if any(isinstance(event, HangDetected) for event in events):
        return "hang"
    if any(isinstance(event, WorkerFailed) for event in events):
        return "worker crash"
    reason = reopened[0].reason if reopened else ""
    if lost:
        announced = "was preempted" in reason or reason == "rescale at a step boundary"
        announced |= any(left.get(node, "").startswith("preempted") for node in lost)
        return "preemption" if announced else "node loss"
    if "worker" in reason and "failed with" in reason:
        return "worker crash"
    return "connection" if "connect" in reason or "could not go on" in reason else "scale-up"


def _account_node(line: _Line, run: _Run) -> None:
    """Draw the line of one node."""
    own = run.events[line.node]
    entries = [event for event in own if isinstance(event, RoundEntered)]
    ready = next((event.time for event in own if isinstance(event, NodeReady)), None)
    first = entries[0].time if entries else line.time.ended
    line.draw(first if ready is None else min(ready, first), "starting")
    _wait(line, first, run)
    for index, entry in enumerate(entries):
        following = entries[index + 1] if index + 1 < len(entries) else None
        entry_cause = run.causes[entries[index - 1].round] if index else None
        account_work = _account_unreported if run.unreported else _account_steps
        account_work(line, run, entry.round, entry_cause, following)
        _account_end(line, run, entry.round, following)


def _wait(line: _Line, until: float, run: _Run) -> None:
    """Draw the time outside of the rounds: idle while others train, otherwise waiting for the minimum."""
    for started, ended in run.sealed:
        if ended <= line.at:
            continue
        line.draw(min(started, until), "waiting")
        line.draw(min(ended, until), "idle")
    line.draw(until, "waiting" if run.ended_in is None else "idle")


def _account_unreported(
    line: _Line, run: _Run, number: int, entry_cause: Cause | None, following: RoundEntered | None
) -> None:
    """Draw the time from the entry into a round to its end, as far as it is known of a script without a session."""
    repeated = any(later > number for later, _ in run.entries)
    known = run.unreported[number]
    work = UnreportedWork.of(known, run.by_round[line.node, number], repeated=repeated)
    ended = work.ended if following is None else min(work.ended, following.time)
    if following is None and run.ended_in != number and not _has_left(run, line.node, number):
        ended = line.time.ended  # it was killed, which the others have noticed a moment later
    begun = ended if work.begun is None else min(work.begun, ended)
    line.draw(begun, "recovering" if entry_cause else "starting", number, entry_cause)
    line.draw(min(work.kept, ended), "training", number)
    if work.loses:
        line.draw(ended, "lost work", number, run.causes[number])
    else:
        line.draw(ended, "unknown", number)


def _account_steps(
    line: _Line, run: _Run, number: int, entry_cause: Cause | None, following: RoundEntered | None
) -> None:
    """Draw the time from the entry into a round to its last step."""
    steps = _Steps.of(run, line.node, number)
    if line.time.running and following is None and not _has_seen_the_end(run, line.node, number):
        steps = replace(steps, ended=max(steps.ended, line.time.ended))
    line.draw(steps.started, "recovering" if entry_cause else "starting", number, entry_cause)
    cause = run.causes[number]
    pauses = steps.pauses(run.commits.get(number, ()))
    kept_until = steps.time_of(run.kept[number])
    # Between two of these times nothing changes, so that the middle of a piece tells what all of it is.
    for time in sorted({*(edge for pause in pauses for edge in pause), kept_until, steps.ended}):
        middle = (line.at + time) / 2
        if line.at < steps.ended or any(started <= middle <= ended for started, ended in pauses):
            if any(started <= middle <= ended for started, ended in pauses):
                line.draw(time, "saving", number)
            elif middle <= kept_until:
                line.draw(min(time, steps.ended), "training", number)
            else:
                line.draw(min(time, steps.ended), "lost work", number, cause)


def _account_end(line: _Line, run: _Run, number: int, following: RoundEntered | None) -> None:
    """Draw the time from a node's work in a round to its entry into its next one, or to its end."""
    cause = run.causes[number]
    if following is not None and following.round == number + 1:
        line.draw(following.time, "recovering", number, cause)
    elif following is not None:  # rounds between the two had no place for it
        _leave_round(line, run, number, cause)
        _wait(line, following.time, run)
    elif run.ended_in == number:
        line.draw(line.time.ended, "idle", number)
    elif any(isinstance(event, NodeLeft) for event in run.events[line.node]):
        line.draw(line.time.ended, "recovering", number, cause)
    elif not _has_seen_the_end(run, line.node, number):
        line.draw(line.time.ended, "lost work", number, cause)  # the step in which it was killed
    else:
        _leave_round(line, run, number, cause)
        line.draw(line.time.ended, "idle", number)


def _leave_round(line: _Line, run: _Run, number: int, cause: Cause) -> None:
    """Draw the time until the others have the next round."""
    later = [time for entered, time in run.entries if entered > number]
    line.draw(min(later, default=line.time.ended), "recovering", number, cause)


def _has_left(run: _Run, node: str, number: int) -> bool:
    """Return whether a node has recorded that it has left the run, or the round's end."""
    left = any(isinstance(event, NodeLeft) for event in run.events[node])
    return left or _has_seen_the_end(run, node, number)


def _has_seen_the_end(run: _Run, node: str, number: int) -> bool:
    return any(isinstance(event, RoundReopened) for event in run.by_round.get((node, number), ()))


@dataclass(frozen=True)
class _Steps:
    """Training of one node in one round.

    Args:
        started: time at which its first step began.
        ended: time of its last step.
        times: times at which steps were completed, in order, beginning with ``started``.
        steps: numbers of these steps, beginning with the restored one.
    """

    started: float
    ended: float
    times: tuple[float, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, run: _Run, node: str, number: int) -> _Steps:
        own = run.by_round[node, number]
        done = [(event.time, event.step) for event in own if isinstance(event, Progress)]
        launched = [event.time for event in own if isinstance(event, RoundEntered | WorkersStarted | Restored)]
        if not done:
            started = max(launched)
            return cls(started, started, (started,), (run.restored.get(number, 0),))
        restored = run.restored.get(number, done[0][1] - 1)
        (first_time, first_step), (last_time, last_step) = done[0], done[-1]
        each = (last_time - first_time) / (last_step - first_step) if last_step > first_step else 0.0
        missing = run.reached[number] - last_step
        if each and missing > 0 and not any(isinstance(event, Progress) and event.last for event in own):
            # A killed node has not recorded its last steps, which were those of the others, too.
            last_time, last_step = last_time + missing * each, last_step + missing
            done.append((last_time, last_step))
        before = [at for at in launched if at <= first_time]
        # The duration of a step is unknown where one alone was reported, as in the table.
        started = max([first_time - each * max(1, first_step - restored), *before] if each else before or [first_time])
        return cls(started, last_time, (started, *(at for at, _ in done)), (restored, *(step for _, step in done)))

    def time_of(self, step: float) -> float:
        """Return the time at which a step was completed, between reported ones in proportion."""
        if step >= self.steps[-1]:
            return math.inf
        right = bisect.bisect_right(self.steps, step)
        if right == 0:
            return self.started
        left = right - 1
        share = (step - self.steps[left]) / (self.steps[right] - self.steps[left])
        return self.times[left] + share * (self.times[right] - self.times[left])

    def pauses(self, commits: Iterable[CheckpointCommitted]) -> list[tuple[float, float]]:
        """Return the spans in which training paused to save: after the step of each checkpoint of the round."""
        found = []
        for commit in commits:
            if self.steps[0] < commit.step:
                at = min(self.time_of(commit.step), self.ended)
                found.append((at, at + commit.seconds))
        return found
