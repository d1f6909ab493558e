"""Decisions about an open round: whether a candidate seals it, with which members, and when.

A round with its minimum is sealed at once, unless nodes are known to be coming.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.events import Roster
from azureml_elastic.node.core.joining import MeetingPoints, ReadSchedule
from azureml_elastic.node.core.round import Limits, Member, Round, arranged, preferred, whole_replicas


def candidates(round_: Round, members: Iterable[Member]) -> list[Member]:
    """Return the nodes that want to be in the open round, in the order of the ranks that they would get.

    Members of the round before keep their order, so that rank 0 and its memory stay where they are. Others follow by
    name.
    """
    waiting = {each.node: each for each in members if each.state == "waiting" and each.round == round_.number}
    survivors = [waiting.pop(node) for node in round_.previous if node in waiting]
    return survivors + sorted(waiting.values(), key=lambda member: member.node)


def is_quarantined(member: Member, limits: Limits) -> bool:
    """Return whether the member's host has so many strikes that it is a member only where the minimum needs it."""
    return limits.quarantine is not None and member.strikes >= limits.quarantine


def partitioned_nodes(ranked: Sequence[Member]) -> dict[str, int]:
    """Return the nodes to leave out so that all others reach each other, each with the number of nodes it cannot reach.

    The node that is cut off from most others is left out first, among equals the one with the last rank. So a node that
    is cut off from all others is left out itself, whichever side noticed it.
    """
    if not any(member.unreached for member in ranked):
        return {}
    names = {member.incarnation: member.node for member in ranked}
    unreachable: dict[str, set[str]] = {member.node: set() for member in ranked}
    for member in ranked:
        for incarnation in member.unreached:
            # Who is no candidate does not count, nor a former process of one.
            peer = names.get(incarnation, member.node)
            if peer != member.node:
                unreachable[member.node].add(peer)
                unreachable[peer].add(member.node)
    removed: dict[str, int] = {}
    # The fewest nodes to leave out would be a minimum vertex cover, which is NP-hard; taking the worst one each time
    # comes close. Of equals max() takes the first, which in this order has the last rank.
    order = [member.node for member in reversed(ranked)]
    while (worst := max(order, key=lambda node: len(unreachable[node]), default=None)) and unreachable[worst]:
        removed[worst] = len(unreachable[worst])
        for peer in unreachable.pop(worst):
            unreachable[peer].discard(worst)
        order.remove(worst)
    return removed


def select_members(round_: Round, ranked: Sequence[Member], limits: Limits) -> list[Member]:
    """Return the members of the round that is sealed with these candidates, in rank order.

    They are whole replicas, see :mod:`~azureml_elastic.node.core.round`.

    - Above the maximum, candidates with fewer strikes are preferred, a spare even to a survivor: the workers are
      restarted in any case, and a host that broke one round is likelier to break the next. Among equals the order of
      ranks decides, which prefers survivors.
    - One survivor of each place is kept where there is more than one node, because they hold the newest state in
      memory.
    - Quarantined and partitioned nodes become members only where the minimum is not reached without them, those that
      are cut off from fewest first, then those with the fewest strikes. They get the last ranks, because the loss of
      rank 0's node costs most.
    """
    accepted = [member for member in ranked if not is_quarantined(member, limits)]
    partitioned = partitioned_nodes(accepted)
    # The sort is stable: among those with as many strikes the order of ranks stays.
    fit = sorted((each for each in accepted if each.node not in partitioned), key=lambda member: member.strikes)
    fit_names = {member.node for member in fit}
    unfit = sorted(
        (member for member in ranked if member.node not in fit_names),
        key=lambda member: (partitioned.get(member.node, 0), member.strikes),
    )
    size = limits.nodes_per_replica
    count = whole_replicas(min(len(fit), limits.maximum), size)
    names = preferred([member.node for member in fit], round_.previous, round_.places, count, size)
    taken = [member for member in ranked if member.node in names]
    if len(taken) < limits.minimum:
        others = [member for member in fit if member.node not in names] + unfit
        taken += others[: max(0, limits.minimum - len(taken))]
        taken = taken[: whole_replicas(len(taken), size)]
    by_name = {member.node: member for member in taken}
    return [by_name[node] for node in arranged([*by_name], fit_names, round_.previous, round_.places, size)]


def describe_partitions(ranked: Sequence[Member], sealed: Collection[str]) -> list[str]:
    """Return a text for each partitioned candidate: whether it is among ``sealed``, and which nodes it cannot reach."""
    texts = []
    for node in partitioned_nodes(ranked):
        own = next(member for member in ranked if member.node == node)
        concerned = [member for member in ranked if member is own or own.incarnation in member.unreached]
        reasons = [member.reason for member in concerned if member.reason]
        more = f" (and {len(reasons) - 1} similar reports)" if len(reasons) > 1 else ""
        texts.append(f"{'with' if node in sealed else 'without'} {node}: {reasons[-1] if reasons else ''}{more}")
    return texts


def is_complete(round_: Round, members: Sequence[Member], limits: Limits) -> bool:
    """Return whether no further node needs to be waited for, given that the minimum is present.

    That is so when every node that is known to be coming is present: in the first round the nodes that have announced
    themselves and still import, later the survivors of the round before and the nodes that waited beside it. Where the
    maximum is present, only these survivors are waited for. Quarantined and
    partitioned nodes are not waited for, and do not count towards the maximum. If the minimum is reached only with
    nodes that cannot reach each other, any other node is waited for.
    """
    ranked = candidates(round_, members)
    present = {member.node for member in ranked}
    partitioned = partitioned_nodes(ranked)
    needed = partitioned and len(present) < limits.maximum and select_members(round_, ranked, limits)
    if needed and any(member.node in partitioned for member in needed):
        return False
    excluded = {member.node for member in members if is_quarantined(member, limits)} | partitioned.keys()
    if round_.number == 1:
        coming = {member.node for member in members if member.state == "starting"}
    else:
        coming = set(round_.expected) - {member.node for member in members if member.state == "left"}
    if len(present - excluded) >= limits.maximum:
        # Nodes that waited may be faster than survivors, of which one alone may hold the newest state in memory.
        coming &= {*round_.previous}
    return coming - excluded <= present


class SealTimer:
    """Decides when this node seals the open round.

    A round with its minimum is sealed at once, unless nodes are known to be coming, which are waited for up to
    ``settle_timeout`` or ``rejoin_timeout``, or preempted ones still save what the next round continues from. The node
    that will be rank 0 seals; if it does not, each next candidate does ``takeover_delay`` later.

    Args:
        timings: settle and rejoin timeout, takeover delay.

    Attributes:
        next_change: seconds until time alone may change the decision.
    """

    def __init__(self, round_: Round, limits: Limits, timings: RendezvousTimings) -> None:
        self._round = round_
        self._limits = limits
        self._takeover = timings.takeover_delay.total_seconds()
        first = round_.number == 1
        self._timeout = (timings.settle_timeout if first else timings.rejoin_timeout).total_seconds()
        self._minimum_since: float | None = None
        self._ready_since: float | None = None
        self.next_change = float("inf")

    def is_due(self, members: Sequence[Member], me: str, now: float) -> bool:
        """Return whether the node ``me`` seals the round, given the present rows and the time in monotonic seconds."""
        ranked = candidates(self._round, members)
        inside = [member.node for member in select_members(self._round, ranked, self._limits)]
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
    enough = len(select_members(round_, candidates(round_, others), limits)) >= limits.minimum
    return others if enough else rows


def seal(round_: Round, members: Iterable[Member], limits: Limits) -> Round:
    """Return the round sealed with the members that are selected from these rows."""
    selected = select_members(round_, candidates(round_, members), limits)
    size = limits.nodes_per_replica
    return replace(round_, state="sealed", members=tuple(selected), nodes_per_replica=size)


_WRITE_SECONDS = 1.0
"""Time after which a node that has sent its row to a hub also writes it into the table."""


class Verdict(Enum):
    """Whether a candidate seals the round."""

    WAIT = "wait"
    CONFIRM = "confirm"
    """By the rows it does, unless a later round has run, which its heartbeat shows."""

    SEAL = "seal"


class Candidacy:
    """One node as a candidate of one open round.

    Args:
        known: other nodes by name: the members of the round before, or the rows as they were read.
        wrote_round: whether this node has written the open round itself.

    Attributes:
        points: where candidates meet.
        schedule: when this node reads the rows.
        write_at: when it writes its row into the table.
        read_began: when it began to read the rows last.
        offered: whether it is a candidate at its own hub.
        knows_all: whether the rows would show it nothing that it does not know.
        should_seal: whether it is among the first candidates at its own hub.
        sealed: the version that it writes.
    """

    def __init__(
        self,
        round_: Round,
        me: Member,
        known: Mapping[str, Member | Mapping[str, Any]],
        limits: Limits,
        timings: RendezvousTimings,
        now: float,
        *,
        wrote_round: bool,
    ) -> None:
        # The first survivor, if it has written the open round itself, knows whom to expect, and they come to its hub.
        # No later round has run then, and the seal is refused where the row has changed since. So a loss needs two
        # answers of the table, which may throttle: one for the open round, one for the seal.
        self.knows_all = wrote_round and round_.previous[:1] == (me.node,)
        self.points = MeetingPoints(round_, me, known)
        self.schedule = ReadSchedule(now, knows_all=self.knows_all)
        self.write_at = now + _WRITE_SECONDS
        self.read_began = now
        self.written = self.offered = self.should_seal = False
        self.sealed = round_
        self._round = round_
        self._limits = limits
        self._timer = SealTimer(round_, limits, timings)
        self._rows: Mapping[str, Member] = {}
        self._present: list[Member] = []
        self._has_read = False

    def offer_again(self, now: float) -> None:
        """The node's row has changed: its hub and the table must get it."""
        self.written = self.offered = False
        self.write_at = now

    def read(self, roster: Roster, me: Member, now: float) -> None:
        """Take in the rows as they were read."""
        if self.written and roster.get(me.node, {}).get("incarnation") != me.incarnation:
            self.written, self.write_at = False, now  # the row is gone
        self.knows_all = False
        self.points.update(roster)
        self._rows = {node: Member.from_value(value) for node, value in roster.items()}
        self._has_read = True

    def could_not_read(self, now: float) -> None:
        """The rows cannot be read now."""
        self.schedule.has_read(now, self._timer.next_change)

    def decide(self, received: Sequence[Member], me: Member, now: float) -> Verdict:
        """Decide whether this node seals: by what its hub has received, and if so once more by the rows.

        Args:
            received: rows that candidates have sent to the hub.
        """
        confirmed, self._has_read = self._has_read, False
        self._present = self._all_present(received, me, confirmed=confirmed)
        awaited = frozenset((*self._round.expected, *self._round.finishing)) if confirmed else self.points.late
        self.points.late = awaited.difference(row.node for row in candidates(self._round, [*self._present, *received]))
        # An answer of a table that throttles is seconds old. Who has written a row since then is not late for it.
        is_due = self._timer.is_due(self._present, me.node, self.read_began if confirmed else now)
        if self.knows_all:
            here = {member.node for member in received if member.round == self._round.number}
            all_are_here = {*self._round.expected} <= here | {me.node}
            return self._seal(self._present) if all_are_here and is_due else Verdict.WAIT
        # What the hub has received is reason enough to read, not to seal: nodes that cannot reach this hub have only
        # their rows.
        if confirmed and is_due:
            return Verdict.CONFIRM
        if confirmed:
            self.schedule.has_read(now, self._timer.next_change)
        else:
            if is_due:
                self.schedule.read_now(now)
            self.schedule.has_decided(now, self._timer.next_change)
        return Verdict.WAIT

    def confirm(self, me: Member) -> None:
        """No later round has run: this node seals by the rows, without those before it that should have."""
        self._seal(drop_unresponsive(self._round, self._present, me.node, self._limits))

    def fail(self, error: str) -> None:
        """The sealed round does not fit into a row: this node ends the run instead."""
        message = (
            f"A round of {len(self.sealed.members)} nodes does not fit the table: {error} Lower max_instance_count, or "
            "give the nodes shorter names."
        )
        self.sealed = replace(self._round, state="failed", message=message, exit_code=1)

    def describe(self) -> list[str]:
        """Return a text for each candidate of the sealed round that cannot reach another one."""
        names = {member.node for member in self.sealed.members}
        texts = describe_partitions(candidates(self._round, self._present), names)
        return [f"Round {self._round.number} is sealed {text}" for text in texts]

    def _seal(self, members: Sequence[Member]) -> Verdict:
        self.sealed = seal(self._round, members, self._limits)
        return Verdict.SEAL

    def _all_present(self, received: Sequence[Member], me: Member, *, confirmed: bool) -> list[Member]:
        """Return all nodes, by what they have sent to this node's hub or, for the others, by their rows.

        Args:
            received: rows that candidates have sent to the hub.
            confirmed: whether to leave out nodes that have no row of the same incarnation.
        """
        # A node may have sent its candidacy before it wrote that it leaves.
        left = {row.incarnation for row in self._rows.values() if row.state == "left"}
        is_gone = self.points.is_gone
        known = {node: replace(row, state="left") if is_gone(row) else row for node, row in self._rows.items()}
        here = {member.node: member for member in (*received, me) if member.incarnation not in left}
        if confirmed:
            # The connection of a node's former process may still be here while the row is that of the new one.
            incarnations = {row.incarnation for row in self._rows.values()}
            here = {node: row for node, row in here.items() if row.incarnation in incarnations or row is me}
        return [*{**known, **here}.values()]
