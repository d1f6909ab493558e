"""Timeline of a run from its picture: rounds, world sizes and recoveries. Pure functions.

Rounds are ordered by number. Durations are differences of two times that *one* node wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from azureml_elastic.ledger.events import (
    HangDetected,
    NodeLeft,
    Progress,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.picture import Picture, Round
from azureml_elastic.ledger.samples import steps_undone
from azureml_elastic.ledger.sentences import describe


@dataclass(frozen=True)
class RoundSpan:
    """Time span of one sealed round.

    Args:
        number: number of the round, from 1; rounds that no node has reported are missing.
        started: time at which the reporting member entered the round, by that member's clock.
        ended: time of the same member's last event in the round.
        reporter: name of that member.
        restored_step: number of completed steps before the round, ``None`` if its workers did not get that far.
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


def rounds(picture: Picture) -> list[RoundSpan]:
    """Return the sealed rounds by number."""
    return list(map(_span, picture.sealed))


def world_sizes(rounds_: Iterable[RoundSpan]) -> list[int]:
    """Return the world sizes of successive rounds that trained or started workers, equal neighbours merged."""
    sizes: list[int] = []
    for round_ in rounds_:
        trained = round_.ran or round_.last_step is not None
        if trained and (not sizes or sizes[-1] != round_.world_size):
            sizes.append(round_.world_size)
    return sizes


def recoveries(picture: Picture, losses: Iterable[tuple[str, float]] = ()) -> list[RecoverySpan]:
    """Return the recoveries in the order of the rounds that they ended.

    Losses are lost nodes with the times of their losses; only for a caller that shares the nodes' clock.
    """
    losses = list(losses)
    spans = rounds(picture)
    found: list[RecoverySpan] = []
    for index, (span, following) in enumerate(pairwise(spans)):
        lost = span.lost or tuple(node for node in span.members if node not in following.members)
        resumed = next((later for later in spans[index + 1 :] if _resumes(picture.rounds[later.number])), None)
        ended = picture.rounds[span.number]
        if resumed is None or not (lost or ended.failed):
            continue
        back = _resumes(picture.rounds[resumed.number])
        pause = _pause(ended, span, back, [time for node, time in losses if node in lost])
        if pause is not None:
            found.append(RecoverySpan(span.number, resumed.number, resumed.first_step, *pause, lost, span.reason))
    undone = steps_undone(picture)
    # Steps that two losses have undone together are those of the later one.
    ends = [min(one.resumed, other.round) for one, other in pairwise(found)] + [each.resumed for each in found[-1:]]
    return [
        each
        if each.step is None
        else replace(each, lost_steps=sum(undone.get(number, 0) for number in range(each.round + 1, end + 1)))
        for each, end in zip(found, ends, strict=True)
    ]


def _span(round_: Round) -> RoundSpan:
    """Describe one round that was entered."""
    entry, entered = round_.entry, round_.times_by_node(RoundEntered)
    assert entry is not None, "the round is sealed"
    # Both times are those of a node that recorded the round's end, so that they come from one clock.
    closing = [*round_.all(RoundReopened), *round_.all(RunEnded), *round_.all(NodeLeft)]
    reporter = next((event.node for event in closing if event.node in entered), entry.node)
    started, own = entered[reporter][-1], round_.parts[reporter]
    reopened, ended = round_.first(RoundReopened), round_.first(RunEnded)
    reason = "" if ended is None else describe(ended) or ""
    return RoundSpan(
        number=round_.number,
        members=entry.members,
        world_size=entry.world_size,
        started=started,
        ended=max(started, (own.times(RoundReopened, RunEnded) or [own.latest])[0]),
        reporter=reporter,
        restored_step=round_.restored,
        first_step=min(round_.steps, default=None),
        last_step=max(round_.steps, default=None),
        ran=round_.has(WorkersStarted),
        reason=reason if reopened is None else reopened.reason,
        lost=() if reopened is None else reopened.lost,
    )


def _pause(
    ended: Round, span: RoundSpan, resumed: dict[str, float], lost_at: Sequence[float]
) -> tuple[float, Literal["loss", "notice", "last step"]] | None:
    """Return the time from the loss to the first step afterwards, as exactly as the events allow."""
    # Losses are given only where all nodes have one clock; the other times are differences of one node's.
    back = min(resumed.values())
    within = [time for time in lost_at if span.started <= time <= back]
    if within:
        return back - min(within), "loss"
    # A hang is detected long after training has stopped, so the last step counts.
    noticed = {} if ended.has(HangDetected) else ended.times_by_node(WorkerFailed, RoundReopened)
    if pauses := [resumed[node] - times[0] for node, times in noticed.items() if node in resumed]:
        return max(0.0, min(pauses)), "notice"
    trained = ended.times_by_node(Progress)
    if pauses := [resumed[node] - times[-1] for node, times in trained.items() if node in resumed]:
        return max(0.0, min(pauses)), "last step"
    return None


def _resumes(round_: Round) -> dict[str, float]:
    """Return for each node when training has continued in a round, by its clock; empty where it has not.

    Workers without a session report no steps, so that they have continued when they began to connect to each other.
    """
    if steps := round_.times_by_node(Progress):
        return {node: times[0] for node, times in steps.items()}
    seconds = round_.connecting_seconds
    entries = round_.times_by_node(RoundEntered)
    return {} if seconds is None else {node: times[0] + seconds for node, times in entries.items()}
