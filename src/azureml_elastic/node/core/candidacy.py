"""What a candidate of an open round knows, and whether it seals the round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.join_events import Roster
from azureml_elastic.node.core.joining import MeetingPoints, ReadSchedule
from azureml_elastic.node.core.round import Limits, Member, Round
from azureml_elastic.node.core.sealing import SealTimer, candidates, describe_partitions, drop_unresponsive, seal

__all__ = ["Candidacy", "Verdict"]

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
        me: row of the node.
        known: other nodes by name: the members of the round before, or the rows as they were read.
        limits: node counts.
        timings: timeouts.
        now: monotonic seconds.
        wrote_round: whether this node has written the open round itself.

    Attributes:
        points: where candidates meet.
        schedule: when this node reads the rows.
        write_at: when it writes its row into the table.
        written: whether that is done.
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
        # The rank 0 of a round that has lost nobody, which has written the open one, knows whom to expect, and they
        # come to its hub. No later round has run then, and the seal is refused where the row has changed since.
        previous = round_.previous
        self.knows_all = wrote_round and previous[:1] == (me.node,) and {*previous} == {*known}
        self.points = MeetingPoints(round_, me, known)
        self.schedule = ReadSchedule(now, knows_all=self.knows_all)
        self.write_at = now + _WRITE_SECONDS
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
            me: row of this node.
            now: monotonic seconds.
        """
        confirmed, self._has_read = self._has_read, False
        self._present = self._all_present(received, me, confirmed=confirmed)
        is_due = self._timer.is_due(self._present, me.node, now)
        if self.knows_all:
            here = {member.node for member in received if member.round == self._round.number}
            all_are_here = {*self._round.expected} <= here | {me.node}
            return self._seal(self._present) if all_are_here and is_due else Verdict.WAIT
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
            me: row of this node.
            confirmed: whether to leave out nodes that have no row of the same incarnation.
        """
        left = {row.incarnation for row in self._rows.values() if row.state == "left"}
        is_gone = self.points.is_gone
        known = {node: replace(row, state="left") if is_gone(row) else row for node, row in self._rows.items()}
        here = {member.node: member for member in (*received, me) if member.incarnation not in left}
        if confirmed:
            incarnations = {row.incarnation for row in self._rows.values()}
            here = {node: row for node, row in here.items() if row.incarnation in incarnations or row is me}
        return [*{**known, **here}.values()]
