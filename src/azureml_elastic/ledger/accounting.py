"""Accounting of the nodes' time: each second of each node has one activity. Pure functions of the picture.

The times of one node are compared with each other, never with those of another node, with one exception: while a node
waits outside of the rounds, the others' events decide whether it waits for the minimum or is a spare.

A script without a session reports no steps. Of its rounds are known the beginning and the end of a round, the start of
its workers, when these began to connect to each other, which rank 0's node sees, and the last save, which the next
round's node of rank 0 finds. As the clocks of two nodes are never compared, each time that another node has written
counts from that node's entry into the round.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    HangDetected,
    NodeLeft,
    NodeReady,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    StateSaved,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.picture import Node, NodeTime, Picture, Records, Round
from azureml_elastic.ledger.samples import surviving_steps

Activity = Literal["starting", "waiting", "training", "saving", "recovering", "lost work", "unknown", "idle"]
"""What a node does: ``waiting`` is for the minimum of nodes, ``lost work`` is trained again later, ``idle`` is a spare
or after the end of the run. ``unknown`` is the work of a script without a session of which nobody can tell whether it
was kept."""

Cause = Literal["preemption", "node loss", "worker crash", "scale-up", "hang", "connection"]
"""Why the round ended from which a node recovers; ``scale-up`` is every other change at a step boundary."""


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


def account(picture: Picture, times: Mapping[str, NodeTime] | None = None) -> list[Span]:
    """Return the spans of all nodes; those of one node follow each other without a gap over its whole lifetime.

    Args:
        times: lifetimes of nodes that are known better than by their events, such as those of killed nodes.
    """
    run = _Run.of(picture)
    lines = [_Line(name, node, (times or {}).get(name) or node.time) for name, node in sorted(picture.nodes.items())]
    for line in lines:
        _account_node(line, run)
    return [span for line in lines for span in line.spans]


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


@dataclass
class _Line:
    """Spans of one node, drawn from the beginning to the end."""

    name: str
    node: Node
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
            self.spans[-1] = replace(last, ended=until)
        else:
            self.spans.append(Span(self.name, activity, self.at, until, number, cause))
        self.at = until


@dataclass(frozen=True)
class _Run:
    """What concerns the whole run; by number of the round, where there is one.

    Args:
        sealed: time spans in which rounds ran, in order.
        kept: last step that no later round has trained again.
        reached: last step that a node has reported.
        causes: why each round ended.
        following: time at which the first node entered a later round; the last round has none.
        ended_in: round in which the run ended, ``None`` if it has not.
    """

    picture: Picture
    sealed: Sequence[tuple[float, float]]
    kept: Mapping[int, float]
    reached: Mapping[int, int]
    causes: Mapping[int, Cause]
    following: Mapping[int, float]
    ended_in: int | None

    @classmethod
    def of(cls, picture: Picture) -> _Run:
        rounds = picture.sealed
        started = [own.times(RoundEntered)[0] for own in rounds]
        ends = [(own.times(RoundReopened, RunEnded) or [own.latest])[0] for own in rounds]
        ended = picture.ended
        return cls(
            picture,
            list(zip(started, ends, strict=True)),
            surviving_steps(picture.restored, (own.number for own in rounds)),
            {own.number: max(own.steps, default=0) for own in rounds},
            {own.number: _cause(own, picture) for own in rounds},
            # From the last one on, the first entry of all later rounds.
            {
                own.number: first
                for own, first in zip(reversed(rounds[:-1]), accumulate(reversed(started), min), strict=False)
            },
            None if ended is None else ended.round,
        )


def _cause(round_: Round, picture: Picture) -> Cause:
    """Return why a round ended, by its events and the reasons with which nodes have left."""
    if round_.has(HangDetected):
        return "hang"
    if round_.has(WorkerFailed):
        return "worker crash"
    reopened = round_.all(RoundReopened)
    reason = reopened[0].reason if reopened else ""
    lost = [picture.nodes[node] for event in reopened for node in event.lost if node in picture.nodes]
    if any(event.lost for event in reopened):
        announced = "was preempted" in reason or reason == "rescale at a step boundary"
        left = [event for node in lost for event in node.all(NodeLeft)[-1:]]
        announced |= any(event.reason.startswith("preempted") for event in left)
        return "preemption" if announced else "node loss"
    if "worker" in reason and "failed with" in reason:
        return "worker crash"
    return "connection" if "connect" in reason or "could not go on" in reason else "scale-up"


def _account_node(line: _Line, run: _Run) -> None:
    """Draw the line of one node."""
    entries = line.node.all(RoundEntered)
    first = entries[0].time if entries else line.time.ended
    line.draw(min([first, *line.node.times(NodeReady)[:1]]), "starting")
    _wait(line, first, run)
    for index, entry in enumerate(entries):
        following = entries[index + 1] if index + 1 < len(entries) else None
        cause = run.causes[entries[index - 1].round] if index else None
        (_account_steps if run.picture.has(Progress, Restored) else _account_unreported)(
            line, run, entry.round, cause, following
        )
        _account_end(line, run, entry.round, following)


def _wait(line: _Line, until: float, run: _Run) -> None:
    """Draw the time outside of the rounds: idle while others train, otherwise waiting for the minimum."""
    for started, ended in run.sealed:
        if ended > line.at:
            line.draw(min(started, until), "waiting")
            line.draw(min(ended, until), "idle")
    line.draw(until, "waiting" if run.ended_in is None else "idle")


def _account_unreported(
    line: _Line, run: _Run, number: int, entry_cause: Cause | None, following: RoundEntered | None
) -> None:
    """Draw the time from the entry into a round to its end, as far as it is known of a script without a session.

    Workers that have failed without having connected have not trained. Others that were not seen to connect may have
    trained, alone or by means of their own.
    """
    known, own = run.picture.rounds[number], line.node.parts[number]
    succeeded, repeated = any(event.succeeded for event in known.all(RunEnded)), number in run.following
    entered = own.times(RoundEntered)[0]
    launched = (own.times(WorkersStarted) or [entered])[0]
    noticed = min(known.since_entry(RoundReopened, RunEnded), default=math.inf)
    saves = known.since_entry(StateSaved)
    ended = min([entered + noticed, *own.times(RoundReopened, RunEnded, NodeLeft)])
    begun = launched
    if known.connecting_seconds is not None:
        begun = max(launched, entered + known.connecting_seconds)
    elif not saves and (known.failed or not (succeeded or repeated)):
        begun = math.inf
    # What follows the last save is lost where the round is repeated; without one nobody can tell.
    kept = 0.0
    if succeeded or (noticed == math.inf and not repeated):
        kept = ended
    elif saves:
        kept = entered + max(saves)
    loses = repeated and saves and not succeeded
    if following is not None:
        ended = min(ended, following.time)
    elif run.ended_in != number and not line.node.has(NodeLeft) and not own.has(RoundReopened):
        ended = line.time.ended  # it was killed, which the others have noticed a moment later
    line.draw(min(begun, ended), "recovering" if entry_cause else "starting", number, entry_cause)
    line.draw(min(kept, ended), "training", number)
    line.draw(ended, *(("lost work", number, run.causes[number]) if loses else ("unknown", number)))


def _account_steps(
    line: _Line, run: _Run, number: int, entry_cause: Cause | None, following: RoundEntered | None
) -> None:
    """Draw the time from the entry into a round to its last step."""
    own, commits = line.node.parts[number], run.picture.rounds[number].all(CheckpointCommitted)
    steps = _Steps.of(run, number, own)
    if line.time.running and following is None and not own.has(RoundReopened):
        steps = replace(steps, ended=max(steps.ended, line.time.ended))
    line.draw(steps.started, "recovering" if entry_cause else "starting", number, entry_cause)
    pauses = steps.pauses(commits)
    kept_until = steps.time_of(run.kept[number])
    # Between two of these times nothing changes, so that the middle of a piece tells what all of it is.
    for time in sorted({*(edge for pause in pauses for edge in pause), kept_until, steps.ended}):
        middle = (line.at + time) / 2
        if any(started <= middle <= ended for started, ended in pauses):
            line.draw(time, "saving", number)
        elif middle <= kept_until:
            line.draw(min(time, steps.ended), "training", number)
        else:
            line.draw(min(time, steps.ended), "lost work", number, run.causes[number])


def _account_end(line: _Line, run: _Run, number: int, following: RoundEntered | None) -> None:
    """Draw the time from a node's work in a round to its entry into its next one, or to its end."""
    cause, ended = run.causes[number], line.time.ended
    until_others = run.following.get(number, ended)
    if following is not None and following.round == number + 1:
        line.draw(following.time, "recovering", number, cause)
    elif following is not None:  # rounds between the two had no place for it
        line.draw(until_others, "recovering", number, cause)
        _wait(line, following.time, run)
    elif run.ended_in == number:
        line.draw(ended, "idle", number)
    elif line.node.has(NodeLeft):
        line.draw(ended, "recovering", number, cause)
    elif not line.node.parts[number].has(RoundReopened):
        line.draw(ended, "lost work", number, cause)  # the step in which it was killed
    else:
        line.draw(until_others, "recovering", number, cause)
        line.draw(ended, "idle", number)


@dataclass(frozen=True)
class _Steps:
    """Training of one node in one round.

    Args:
        times: times at which steps were completed, in order, beginning with ``started``.
        steps: numbers of these steps, beginning with the restored one.
    """

    started: float
    ended: float
    times: tuple[float, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, run: _Run, number: int, own: Records) -> _Steps:
        done = [(event.time, event.step) for event in own.all(Progress)]
        begin = run.picture.rounds[number].restored
        launched = own.times(RoundEntered, WorkersStarted, Restored)
        if not done:
            return cls(launched[-1], launched[-1], (launched[-1],), (begin or 0,))
        restored = done[0][1] - 1 if begin is None else begin
        (first_time, first_step), (last_time, last_step) = done[0], done[-1]
        each = (last_time - first_time) / (last_step - first_step) if last_step > first_step else 0.0
        missing = run.reached[number] - last_step
        if each and missing > 0 and not any(event.last for event in own.all(Progress)):
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
