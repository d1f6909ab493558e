"""Rounds and members as data, and every decision about them as a pure function.

A *round* is one agreed set of nodes in rank order. The row ``round`` of the table holds the newest one and moves only
by compare-and-swap::

    (no row) ≡ open 1 ──seal──> sealed 1 ──reopen──> open 2 ──seal──> sealed 2 ── ... ──close──> succeeded | failed

While a round is open, each node that wants to be in it writes its own member row once. The node that will be
rank 0 seals: one write that carries all members and the address of rank 0's store, so that nothing else need be
exchanged. The next in line takes over when it does not. No clock of one machine is compared with another's: every
duration below was measured by the caller on its own monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.failures.restart_policy import FailureRecord, aged, read_records
from azureml_elastic.node.rendezvous.state.member_selection import apart, chosen, quarantined
from azureml_elastic.node.rendezvous.state.row_keys import MEMBER_PREFIX, ROUND_KEY, member_key

__all__ = [
    "MEMBER_PREFIX",
    "ROUND_KEY",
    "Limits",
    "Member",
    "Round",
    "RoundState",
    "SealTimer",
    "candidates",
    "complete",
    "global_ranks",
    "reopened",
    "seal",
]

RoundState = Literal["open", "sealed", "succeeded", "failed"]
MemberState = Literal["starting", "waiting", "left"]


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest number of nodes of a round.

    ``quarantine`` is the number of strikes from which on a node gets a place only where the minimum cannot be reached
    without it; ``None`` for never.
    """

    minimum: int
    maximum: int
    quarantine: int | None = None


@dataclass(frozen=True)
class Member:
    """One node's row.

    Args:
        node: the node's name, unique in the run.
        incarnation: a nonce of the agent process; a restarted node is another incarnation.
        state: ``starting`` while it imports, ``waiting`` when it wants to be in ``round``, ``left`` for good.
        round: the round that the node wants to be in.
        host: where other nodes reach it.
        store_port: where it would serve the round's store.
        hub_port: where it serves heartbeats.
        slots: how many workers it runs.
        reason: why it left, or whom it cannot reach.
        host_id: names the machine that strikes are held against.
        strikes: that were live when the row was written.
        unreached: incarnations of nodes that it cannot reach.
        data_port: where it takes connections to show that workers could, 0 where the hub shows it.
    """

    node: str
    incarnation: str
    state: MemberState = "waiting"
    round: int = 0
    host: str = ""
    store_port: int = 0
    hub_port: int = 0
    slots: int = 1
    reason: str = ""
    host_id: str = ""
    strikes: int = 0
    unreached: tuple[str, ...] = ()
    data_port: int = 0

    @property
    def key(self) -> str:
        """The key of this member's row."""
        return member_key(self.node)

    def to_value(self) -> dict[str, Any]:
        """Return the row's value."""
        value = dict(vars(self))  # all fields are plain; ``asdict`` would take 80 ms for a thousand members
        for name in ("unreached", "data_port"):
            if not value[name]:
                del value[name]  # nearly always, and a round of very many members must fit into one row
        return value

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Member:
        """Read a row's value; fields of later releases are ignored."""
        fields = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        if "unreached" in fields:
            fields["unreached"] = tuple(fields["unreached"])
        return cls(**fields)


@dataclass(frozen=True)
class Round:
    """The row ``round``.

    Args:
        number: counts up from 1.
        state: see the module.
        members: in rank order, once sealed.
        previous: names of the survivors of the round before, in rank order: they keep that order, and whoever
            was lost and comes back goes behind them.
        expected: names of the nodes that should be back, while open.
        failures: worker failures of the whole run that still count, oldest first.
        losses: how many rounds have ended because a node or a worker was lost.
        seconds: for how long the rounds before this one have lasted.
        failed_rounds: number of consecutive rounds that ended because their nodes could not connect to each other
        reason: why the round was reopened.
        message: the failure that ended the run.
        exit_code: with which every node of a failed run exits.
    """

    number: int = 1
    state: RoundState = "open"
    members: tuple[Member, ...] = ()
    previous: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    failures: tuple[FailureRecord, ...] = ()
    losses: int = 0
    seconds: float = 0.0
    failed_rounds: int = 0
    reason: str = ""
    message: str = ""
    exit_code: int = 0

    def to_value(self) -> dict[str, Any]:
        """Return the row's value."""
        members = [member.to_value() for member in self.members]
        return {"version": 1, **vars(self), "members": members, "failures": [asdict(each) for each in self.failures]}

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Round:
        """Read the row's value; fields of later releases are ignored."""
        fields = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        fields["members"] = tuple(Member.from_value(member) for member in value.get("members", ()))
        for name in ("previous", "expected"):
            fields[name] = tuple(value.get(name, ()))
        fields["failures"] = read_records(value.get("failures"))
        return cls(**fields)

    @property
    def closed(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("succeeded", "failed")

    @property
    def world_size(self) -> int:
        """Workers over all members."""
        return sum(member.slots for member in self.members)

    def rank_of(self, node: str, incarnation: str) -> int | None:
        """Return the rank of this incarnation of the node, ``None`` when it is no member."""
        for rank, member in enumerate(self.members):
            if (member.node, member.incarnation) == (node, incarnation):
                return rank
        return None


def candidates(round_: Round, members: Iterable[Member], limits: Limits | None = None) -> list[Member]:
    """Return the members that want to be in the open round, in the order of the ranks that they would get.

    Nodes of the round before keep their order, so that rank 0 and its memory stay where they are; others follow by
    name.

    Args:
        round_: the open round.
        members: all rows.
        limits: leave out those that get no place; see :func:`~azureml_elastic.node.rendezvous.state.member_selection.chosen`.
    """
    ranks = {node: rank for rank, node in enumerate(round_.previous)}
    waiting = [member for member in members if member.state == "waiting" and member.round == round_.number]
    ranked = sorted(waiting, key=lambda member: (ranks.get(member.node, len(ranks)), member.node))
    return ranked if limits is None else chosen(ranked, round_.previous, limits)


def complete(round_: Round, members: Sequence[Member], limits: Limits) -> bool:
    """Return whether waiting any longer would gain nothing, once the minimum is present.

    Nothing is gained when the maximum is there, or nobody is known to be about to come: in the first round a node that
    announced itself and still imports, later a survivor of the round before. A node that is quarantined, or that the
    others cannot reach, is not waited for, and one that is there does not make up for another that is about to come.
    Where the minimum takes nodes that cannot reach each other, another one may still come that can.
    """
    ranked = candidates(round_, members)
    present = {member.node for member in ranked}
    separate = apart(ranked)
    needed = separate and len(present) < limits.maximum and chosen(ranked, round_.previous, limits)
    if needed and any(member.node in separate for member in needed):
        return False
    barred = {member.node for member in members if quarantined(member, limits)} | separate.keys()
    if len(present - barred) >= limits.maximum:
        return True
    if round_.number == 1:
        coming = {member.node for member in members if member.state == "starting"}
    else:
        coming = set(round_.expected) - {member.node for member in members if member.state == "left"}
    return coming - barred <= present


class SealTimer:
    """When a waiting node seals the open round: a decision over time, by one node's monotonic clock.

    The minimum starts at once. Only nodes that are known to be about to come are waited for, and not for long. The
    node that will be rank 0 seals; the others take over one after another when it does not.

    Args:
        round_: the open round.
        limits: node counts.
        timings: the patience.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, round_: Round, limits: Limits, timings: RendezvousTimings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._round = round_
        self._limits = limits
        self._clock = clock
        self._takeover = timings.takeover_delay.total_seconds()
        first = round_.number == 1
        self._limit = (timings.settle_timeout if first else timings.rejoin_timeout).total_seconds()
        self._minimum_since: float | None = None
        self._ready_since: float | None = None
        self.next_look = float("inf")
        """Seconds after which time alone may change the decision."""

    def time_to_seal(self, members: Sequence[Member], me: str) -> bool:
        """Decide by the member rows just read whether the node ``me`` seals now."""
        now = self._clock()
        ranked = candidates(self._round, members)
        inside = [member.node for member in chosen(ranked, self._round.previous, self._limits)]
        # Who gets no place takes over last, in case that all the others have died.
        outside = {member.node for member in ranked}.difference(inside)
        names = inside + [member.node for member in ranked if member.node in outside]
        self.next_look = float("inf")
        if len(inside) < self._limits.minimum or me not in names:
            self._minimum_since = self._ready_since = None
            return False
        if self._minimum_since is None:
            self._minimum_since = now
        left = self._minimum_since + self._limit - now
        if not complete(self._round, members, self._limits) and left > 0:
            self._ready_since = None
            self.next_look = left
            return False
        if self._ready_since is None:
            self._ready_since = now
        turn = self._ready_since + names.index(me) * self._takeover - now
        self.next_look = max(turn, 0.0)
        return turn <= 0


def seal(round_: Round, members: Iterable[Member], limits: Limits) -> Round:
    """Return the sealed round: those candidates that get a place, in rank order."""
    return replace(round_, state="sealed", members=tuple(candidates(round_, members, limits)))


def reopened(
    round_: Round,
    reason: str,
    lost: Iterable[str] = (),
    waiting: Iterable[str] = (),
    *,
    failures: tuple[FailureRecord, ...] = (),
    seconds: float = 0.0,
    round_failed: bool = False,
) -> Round:
    """Return the open round after a sealed one.

    Args:
        round_: the sealed round that ends.
        reason: why.
        lost: nodes that will not be back.
        waiting: nodes outside that are known to want in.
        failures: the run's failures with a new one; by default those of the round go on, older by its length.
        seconds: how long the round lasted by the clock of whoever ends it; 0 for one that was not in it.
        round_failed: whether the round ends because its nodes could not reach each other.
    """
    gone = set(lost)
    survivors = tuple(member.node for member in round_.members if member.node not in gone)
    return Round(
        number=round_.number + 1,
        previous=survivors,
        expected=survivors + tuple(node for node in waiting if node not in survivors and node not in gone),
        failures=failures or aged(round_.failures, seconds),
        losses=round_.losses + bool(gone or failures),
        seconds=round_.seconds + seconds,
        failed_rounds=round_.failed_rounds + 1 if round_failed else 0,
        reason=reason,
    )


def global_ranks(round_: Round, rank: int) -> range:
    """Return the global ranks of the workers on the node with this rank."""
    first = sum(member.slots for member in round_.members[:rank])
    return range(first, first + round_.members[rank].slots)
