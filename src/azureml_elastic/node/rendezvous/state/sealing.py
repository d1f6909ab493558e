"""Decisions about an open round: when a node seals it, with which members, and which round follows a sealed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.failures.restart_policy import FailureRecord, aged
from azureml_elastic.node.rendezvous.state.member_selection import (
    candidates,
    is_quarantined,
    partitioned_nodes,
    select_members,
)
from azureml_elastic.node.rendezvous.state.round import Limits, Member, Round

__all__ = ["SealTimer", "drop_unresponsive", "is_complete", "reopened", "seal"]


def is_complete(round_: Round, members: Sequence[Member], limits: Limits) -> bool:
    """Return whether no further node needs to be waited for, given that the minimum is present.

    That is so when the maximum is present, or every node that is known to be coming is: in the first round the nodes
    that have announced themselves and still import, later the survivors of the round before. Quarantined and
    partitioned nodes are not waited for, and do not count towards the maximum. If the minimum is reached only with
    nodes that cannot reach each other, any other node is waited for.
    """
    ranked = candidates(round_, members)
    present = {member.node for member in ranked}
    partitioned = partitioned_nodes(ranked)
    needed = partitioned and len(present) < limits.maximum and select_members(ranked, round_.previous, limits)
    if needed and any(member.node in partitioned for member in needed):
        return False
    excluded = {member.node for member in members if is_quarantined(member, limits)} | partitioned.keys()
    if len(present - excluded) >= limits.maximum:
        return True
    if round_.number == 1:
        coming = {member.node for member in members if member.state == "starting"}
    else:
        coming = set(round_.expected) - {member.node for member in members if member.state == "left"}
    return coming - excluded <= present


class SealTimer:
    """Decides when this node seals the open round.

    A round with its minimum is sealed at once, unless nodes are known to be coming, which are waited for up to
    ``settle_timeout`` or ``rejoin_timeout``, or preempted ones still save what the next round continues from. The node
    that will be rank 0 seals; if it does not, each next candidate does ``takeover_delay`` later.

    Args:
        round_: open round.
        limits: node counts.
        timings: settle and rejoin timeout, takeover delay.
        clock: clock in monotonic seconds.

    Attributes:
        next_change: seconds until time alone may change the decision.
    """

    def __init__(
        self, round_: Round, limits: Limits, timings: RendezvousTimings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._round = round_
        self._limits = limits
        self._clock = clock
        self._takeover = timings.takeover_delay.total_seconds()
        first = round_.number == 1
        self._timeout = (timings.settle_timeout if first else timings.rejoin_timeout).total_seconds()
        self._minimum_since: float | None = None
        self._ready_since: float | None = None
        self.next_change = float("inf")

    def is_due(self, members: Sequence[Member], me: str) -> bool:
        """Return whether the node ``me`` seals the round now, given the current member rows."""
        now = self._clock()
        ranked = candidates(self._round, members)
        inside = [member.node for member in select_members(ranked, self._round.previous, self._limits)]
        # Candidates without a place come last in the order, for the case that all others have died.
        outside = {member.node for member in ranked}.difference(inside)
        names = inside + [member.node for member in ranked if member.node in outside]
        self.next_change = float("inf")
        if len(inside) < self._limits.minimum or me not in names:
            self._minimum_since = self._ready_since = None
            return False
        if self._minimum_since is None:
            self._minimum_since = now
        timeout = 0.0 if is_complete(self._round, members, self._limits) else self._timeout
        if set(self._round.finishing) - {member.node for member in members if member.state == "left"}:
            timeout = max(timeout, self._round.finishing_seconds)
        left = self._minimum_since + timeout - now
        if left > 0:
            self._ready_since = None
            self.next_change = left
            return False
        if self._ready_since is None:
            self._ready_since = now
        turn = self._ready_since + names.index(me) * self._takeover - now
        self.next_change = max(turn, 0.0)
        return turn <= 0


def drop_unresponsive(round_: Round, members: Iterable[Member], me: str, limits: Limits) -> list[Member]:
    """Return the rows without the candidates before ``me`` in the order of ranks, which should have sealed but did not.

    They are dead, hang or are slow, and would get the first ranks, on which all others depend. A candidate that is only
    slow becomes a spare, for which the round makes room. All are kept where the minimum is not reached without them.
    """
    rows = list(members)
    names = [member.node for member in candidates(round_, rows)]
    passed = set(names[: names.index(me)] if me in names else names)
    others = [member for member in rows if member.node not in passed]
    enough = len(select_members(candidates(round_, others), round_.previous, limits)) >= limits.minimum
    return others if enough else rows


def seal(round_: Round, members: Iterable[Member], limits: Limits) -> Round:
    """Return the round sealed with the members that are selected from these rows."""
    selected = select_members(candidates(round_, members), round_.previous, limits)
    return replace(round_, state="sealed", members=tuple(selected))


def reopened(
    round_: Round,
    reason: str,
    lost: Iterable[str] = (),
    waiting: Iterable[str] = (),
    *,
    finishing: Iterable[str] = (),
    finishing_seconds: float = 0.0,
    failures: tuple[FailureRecord, ...] = (),
    seconds: float = 0.0,
    round_failed: bool = False,
) -> Round:
    """Return the open round after a sealed one.

    Args:
        round_: sealed round that ends.
        reason: why it ends.
        lost: members that will not go on.
        waiting: spares, which the next round waits for; one may have the name of a lost member.
        finishing: those of the lost nodes whose workers may still save.
        finishing_seconds: seconds for which the next round waits until these have left.
        failures: failures of the run with the one that ends the round; by default those of the round, aged by its
            duration.
        seconds: duration of the round on the clock of the node that ends it; 0 for a node that was not a member.
        round_failed: whether the round ends because its nodes could not connect to each other.
    """
    gone = set(lost)
    survivors = tuple(member.node for member in round_.members if member.node not in gone)
    return Round(
        number=round_.number + 1,
        previous=survivors,
        expected=survivors + tuple(node for node in waiting if node not in survivors),
        finishing=tuple(sorted(finishing)),
        finishing_seconds=finishing_seconds,
        failures=failures or aged(round_.failures, seconds),
        losses=round_.losses + bool(gone or failures),
        seconds=round_.seconds + seconds,
        failed_rounds=round_.failed_rounds + 1 if round_failed else 0,
        reason=reason,
    )
