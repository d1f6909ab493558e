"""Timeline of a run from its events: rounds, world sizes, recoveries and the outcome. Pure functions.

Rounds are ordered by number. Durations are differences of two times that *one* node wrote.

A script without a session reports no steps. Of its rounds are known the beginning and the end of a round, the start of
its workers, when these began to connect to each other, which rank 0's node sees, and the last save, which the next
round's node of rank 0 finds. As the clocks of two nodes are never compared, each time that another node has written
counts from that node's entry into the round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from azureml_elastic.ledger.events import (
    Event,
    HangDetected,
    NodeLeft,
    Progress,
    RanksConnecting,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    StateSaved,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.samples import steps_undone

__all__ = [
    "RecoverySpan",
    "RoundSpan",
    "UnreportedRound",
    "UnreportedWork",
    "headline",
    "outcome",
    "reason_and_losses",
    "recoveries",
    "rounds",
    "world_sizes",
]

_TRACEBACK = "Traceback (most recent call last):"
_LONGEST_HEADLINE = 300


@dataclass(frozen=True)
class UnreportedRound:
    """What the nodes have seen of one round, in seconds since their entries.

    Args:
        connecting: first attempt of workers to connect to each other; ``None`` if that was not seen.
        saved: the last save; ``None`` if none was found.
        ended: end of the round, as the first node noticed it; ``None`` where it has not ended.
        failed: whether a failed or hanging worker has ended it.
        succeeded: whether the run has ended well with it.
    """

    connecting: float | None = None
    saved: float | None = None
    ended: float | None = None
    failed: bool = False
    succeeded: bool = False

    @classmethod
    def of(cls, events: Sequence[Event]) -> UnreportedRound:
        """Return what is known by the events of one round."""
        saves = _since_entry(events, StateSaved)
        ends = _since_entry(events, RoundReopened, RunEnded)
        return cls(
            connecting_seconds(events),
            max(saves, default=None),
            min(ends, default=None),
            any(isinstance(event, WorkerFailed | HangDetected) for event in events),
            any(isinstance(event, RunEnded) and event.succeeded for event in events),
        )


@dataclass(frozen=True)
class UnreportedWork:
    """One node's part in a round, by the node's clock.

    Args:
        begun: beginning of its training; ``None`` if its workers have never got that far.
        kept: end of the work that was kept; what follows is lost where ``loses``, and otherwise unknown.
        ended: end of the round for it; infinite where it runs, or where nobody has recorded the end.
        loses: whether the work after ``kept`` was lost.
    """

    begun: float | None
    kept: float
    ended: float
    loses: bool

    @classmethod
    def of(cls, known: UnreportedRound, own: Sequence[Event], *, repeated: bool) -> UnreportedWork:
        """Return what is known of one node.

        Workers that have failed without having connected have not trained. Others that were not seen to connect may
        have trained, alone or by means of their own. One of the node's own events, which are in order, is its entry;
        ``repeated`` is whether a later round has begun.
        """
        entered = next(event.time for event in own if isinstance(event, RoundEntered))
        launched = next((event.time for event in own if isinstance(event, WorkersStarted)), entered)
        closing = [event.time for event in own if isinstance(event, RoundReopened | RunEnded | NodeLeft)]
        ended = min([*closing, math.inf if known.ended is None else entered + known.ended])
        if known.connecting is not None:
            begun: float | None = max(launched, entered + known.connecting)
        elif known.saved is None and (known.failed or not (known.succeeded or repeated)):
            begun = None
        else:
            begun = launched
        if known.succeeded or (known.ended is None and not repeated):
            kept, loses = ended, False
        elif known.saved is not None:
            kept, loses = entered + known.saved, repeated
        else:
            kept, loses = 0.0, False
        return cls(begun, kept, ended, loses)


def connecting_seconds(events: Sequence[Event]) -> float | None:
    """Return how long after the entry into a round its workers began to connect to each other, ``None`` if unknown."""
    return min(_since_entry(events, RanksConnecting), default=None)


def _since_entry(events: Sequence[Event], *kinds: type[Event]) -> list[float]:
    """Return the times of the events of these kinds in a round, each since the entry of the node that wrote it."""
    entries = {event.node: event.time for event in events if isinstance(event, RoundEntered)}
    return [max(0.0, e.time - entries[e.node]) for e in events if isinstance(e, kinds) and e.node in entries]


@dataclass(frozen=True)
class RoundSpan:
    """Time span of one sealed round.

    Args:
        number: number of the round, from 1; rounds that no node has reported are missing.
        members: nodes in rank order.
        started: time at which the reporting member entered the round, by that member's clock.
        ended: time of the same member's last event in the round.
        reporter: name of that member.
        restored_step: number of completed steps before the round, ``None`` if its workers did not get that far.
        ran: whether workers were started.
        reason: reason of the round's end.
        lost: nodes whose loss ended the round.
    """

    number: int
    members: tuple[str, ...]
    world_size: int
    started: float
    ended: float
    reporter: str
    restored_step: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    ran: bool = False
    reason: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecoverySpan:
    """Pause of training because of a loss.

    Args:
        round: number of the round that the loss ended.
        resumed: number of the round in which training continued.
        step: first step reported in that round; ``None`` without a session.
        seconds: time between ``since`` and that step; without a session, until the workers began to connect.
        since: start of the measurement: the loss itself (if the caller knows it), its detection by a survivor, or the
            last step that a survivor reported.
        lost: lost nodes; empty if a worker failed or hung.
        reason: reason of the round's end.
        lost_steps: number of reported steps that were trained again because of the loss; ``None`` without a session.
            Of several losses before the next restore it is the last one's.
    """

    round: int
    resumed: int
    step: int | None
    seconds: float
    since: Literal["loss", "notice", "last step"]
    lost: tuple[str, ...]
    reason: str
    lost_steps: int | None = None


def rounds(events: Iterable[Event]) -> list[RoundSpan]:
    """Return the sealed rounds by number."""
    by_round = _by_round(events)
    return [
        _round(number, by_round[number])
        for number in sorted(by_round)
        if any(isinstance(event, RoundEntered) for event in by_round[number])
    ]


def world_sizes(rounds_: Iterable[RoundSpan]) -> list[int]:
    """Return the world sizes of successive rounds that trained or started workers, equal neighbours merged."""
    sizes: list[int] = []
    for round_ in rounds_:
        trained = round_.ran or round_.last_step is not None
        if trained and (not sizes or sizes[-1] != round_.world_size):
            sizes.append(round_.world_size)
    return sizes


def recoveries(events: Sequence[Event], losses: Iterable[tuple[str, float]] = ()) -> list[RecoverySpan]:
    """Return the recoveries in the order of the rounds that they ended.

    Losses are lost nodes with the times of their losses; only for a caller that shares the nodes' clock.
    """
    losses = list(losses)
    by_round = _by_round(events)
    all_rounds = rounds(events)
    failed_in = {event.round for event in events if isinstance(event, WorkerFailed | HangDetected)}
    found: list[RecoverySpan] = []
    for index, (round_, following) in enumerate(pairwise(all_rounds)):
        lost = round_.lost or tuple(node for node in round_.members if node not in following.members)
        resumed = next((later for later in all_rounds[index + 1 :] if _resumes(by_round[later.number])), None)
        if resumed is None or not (lost or round_.number in failed_in):
            continue
        pause = _pause(by_round, round_, resumed, [time for node, time in losses if node in lost])
        if pause is not None:
            found.append(RecoverySpan(round_.number, resumed.number, resumed.first_step, *pause, lost, round_.reason))
    undone = steps_undone(events)
    # Steps that two losses have undone together are those of the later one.
    ends = [min(one.resumed, other.round) for one, other in pairwise(found)] + [each.resumed for each in found[-1:]]
    return [
        each
        if each.step is None
        else replace(each, lost_steps=sum(undone.get(number, 0) for number in range(each.round + 1, end + 1)))
        for each, end in zip(found, ends, strict=True)
    ]


def outcome(events: Iterable[Event]) -> tuple[Literal["succeeded", "failed", "unfinished"], str]:
    """Return the outcome of the run according to its nodes, and the reason of a failure."""
    ends = [event for event in events if isinstance(event, RunEnded)]
    if not ends:
        return "unfinished", ""
    last = max(ends, key=lambda event: event.round)
    return "succeeded" if last.succeeded else "failed", last.message


def reason_and_losses(reason: str, lost: Iterable[str]) -> str:
    """Return the reason of a round's end, with those lost nodes that it does not name."""
    unnamed = [node for node in lost if node not in reason]
    return f"{reason} (lost: {', '.join(unnamed)})" if unnamed else reason


def headline(message: str) -> str:
    """Return a message in one line: the exception, where it contains a traceback, otherwise its first line."""
    lines = message.splitlines()
    begin = max((at for at, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=None)
    if begin is not None:
        found = next((line for line in lines[begin + 1 :] if line.strip() and not line[0].isspace()), "")
    else:
        found = next((line for line in lines if line.strip()), "")
    return found if len(found) <= _LONGEST_HEADLINE else f"{found[: _LONGEST_HEADLINE - 3]}..."


def _by_round(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.round, []).append(event)
    return found


def _round(number: int, events: list[Event]) -> RoundSpan:
    """Describe one round; at least one of its events is a ``RoundEntered``."""
    entries = {event.node: event for event in events if isinstance(event, RoundEntered)}
    entry = min(entries.values(), key=lambda event: event.rank)  # all entries name the same members
    # Both times are those of a node that recorded the round's end, so that they come from one clock.
    closing = [event for event in events if isinstance(event, RoundReopened | RunEnded | NodeLeft)]
    reporters = [event.node for kind in (RoundReopened, RunEnded, NodeLeft) for event in closing if type(event) is kind]
    reporter = next((node for node in reporters if node in entries), entry.node)
    steps = [event.step for event in events if isinstance(event, Progress)]
    restored = [event.step for event in events if isinstance(event, Restored)]
    reopened = next((event for event in closing if isinstance(event, RoundReopened)), None)
    ended = next((event for event in closing if isinstance(event, RunEnded)), None)
    reason = ""
    if reopened is not None:
        reason = reopened.reason
    elif ended is not None:
        reason = "the run succeeded" if ended.succeeded else f"the run failed: {headline(ended.message)}"
    return RoundSpan(
        number=number,
        members=entry.members,
        world_size=entry.world_size,
        started=entries[reporter].time,
        ended=_end(events, reporter, entries[reporter].time),
        reporter=reporter,
        restored_step=restored[-1] if restored else None,
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        ran=any(isinstance(event, WorkersStarted) for event in events),
        reason=reason,
        lost=reopened.lost if reopened is not None else (),
    )


def _end(events: list[Event], reporter: str, started: float) -> float:
    """Return the time of the reporter's event for the round's end, otherwise of its last event in the round."""
    own = [event for event in events if event.node == reporter]
    closing = [event.time for event in own if isinstance(event, RoundReopened | RunEnded)]
    return max(started, closing[0] if closing else max(event.time for event in own))


def _pause(
    by_round: Mapping[int, Sequence[Event]], before: RoundSpan, after: RoundSpan, lost_at: Sequence[float]
) -> tuple[float, Literal["loss", "notice", "last step"]] | None:
    """Return the time from the loss to the first step afterwards, as exactly as the events allow."""
    # Losses are given only where all nodes have one clock; the other times are differences of one node's.
    resumed = _resumes(by_round[after.number])
    back = min(resumed.values())
    within = [time for time in lost_at if before.started <= time <= back]
    if within:
        return back - min(within), "loss"
    # A hang is detected long after training has stopped, so the last step counts.
    hung = _times(by_round[before.number], HangDetected)
    noticed = {} if hung else _times(by_round[before.number], WorkerFailed, RoundReopened)
    if pauses := [resumed[node] - times[0] for node, times in noticed.items() if node in resumed]:
        return max(0.0, min(pauses)), "notice"
    trained = _times(by_round[before.number], Progress)
    if pauses := [resumed[node] - times[-1] for node, times in trained.items() if node in resumed]:
        return max(0.0, min(pauses)), "last step"
    return None


def _resumes(events: Sequence[Event]) -> dict[str, float]:
    """Return for each node when training has continued in a round, by its clock; empty where it has not.

    Workers without a session report no steps, so that they have continued when they began to connect to each other.
    """
    if steps := _times(events, Progress):
        return {node: times[0] for node, times in steps.items()}
    seconds = connecting_seconds(events)
    entries = _times(events, RoundEntered)
    return {} if seconds is None else {node: times[0] + seconds for node, times in entries.items()}


def _times(events: Iterable[Event], *kinds: type[Event]) -> dict[str, list[float]]:
    """Return for each node the ordered times of its events of these kinds."""
    times: dict[str, list[float]] = {}
    for event in events:
        if isinstance(event, kinds):
            times.setdefault(event.node, []).append(event.time)
    return times
