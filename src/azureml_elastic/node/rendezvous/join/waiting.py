"""Waiting for a round: for the seal of an open one, or as a spare beside a running one.

Nodes that wait for an open round meet at one hub, the *meeting point*, and send it their rows. The hub sends the first
of them that it should seal; that node, and one more in case it dies, read the rows of the table. All others receive the
sealed round from the hub and read nothing. Which hub is the meeting point needs no agreement: each node takes the first
one that it knows and can reach, moves when it learns of an earlier one, and forwards what it receives to the nodes at
its own hub.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from azureml_elastic.errors import TableUnavailable, ValueTooLarge
from azureml_elastic.node.core.joining import MeetingPoints, ReadSchedule
from azureml_elastic.node.core.round import Member, Round, has_gone_back, reopened
from azureml_elastic.node.core.sealing import SealTimer, candidates, describe_partitions, drop_unresponsive, seal
from azureml_elastic.node.host.addresses import format_address
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.hub.watch import HubWatch
from azureml_elastic.node.rendezvous.join.sleeper import Sleeper
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability
from azureml_elastic.node.rendezvous.state.rows import Roster, Rows
from azureml_elastic.node.rendezvous.table_heartbeat import StaleHeartbeat, TableHeartbeat

__all__ = ["JoinWaiter"]

_LOG = logging.getLogger(__name__)

_ALONE_SECONDS = (0.1, 2.0)
"""First and longest pause between two reads of a spare that is not connected to rank 0's hub."""

_WRITE_SECONDS = 1.0
"""Time after which a node that has sent its row to a hub also writes it into the table."""

_CHECK_SECONDS = 20.0
"""Time between two reads of a spare that is connected to rank 0's hub, in case the hub fails to send a change."""


@dataclass(frozen=True)
class JoinWaiter:
    """One node's waits, connected to a hub that sends changes, with reads of the table only where they are needed.

    Args:
        context: settings and shared objects.
        rows: table rows.
        hub: this node's own hub, which forwards changes.
        watch: connection to another node's hub.
        heartbeat: table heartbeat, read where rank 0's hub cannot be reached.
        reachability: nodes that this node cannot reach.
        sleeper: pauses that other threads can end.
    """

    context: Context
    rows: Rows
    hub: Hub
    watch: HubWatch
    heartbeat: TableHeartbeat
    reachability: Reachability
    sleeper: Sleeper

    def wait_for_seal(self, round_: Round, me: Member, known: Mapping[str, Member] | Roster) -> Round:
        """Become a candidate of an open round, wait until this node or another one has changed it, and return it.

        Args:
            round_: open round.
            me: this node, with the round's number.
            known: other nodes by name: the members of the round before, or the rows as they were read last.
        """
        # In the first round nodes find each other by their rows. Later they know each other, and a message suffices.
        me = self.reachability.marked(me)
        written = (round_.number == 1 or self.rows.has_left) and self._write(round_, me)
        write_at = self.context.clock() + _WRITE_SECONDS
        self.hub.add_own_candidacy(round_, me)
        points = MeetingPoints(round_, me, known)
        timer = SealTimer(round_, self.context.limits, self.context.timings)
        knows_all = self._knows_all(round_, me, known)
        schedule = ReadSchedule(self.context.clock(), knows_all=knows_all)
        rows: dict[str, Member] = {}
        while (newer := self.context.latest.after(round_)) is None:
            schedule.set_active(self._meet(points, round_, me, schedule), self.context.clock())
            if (marked := self.reachability.marked(me)) != me:
                me = marked
                self.hub.add_own_candidacy(round_, me)
                written, write_at = False, self.context.clock()
            alone = self.watch.link is None and not points.is_first
            if not written and (alone or self.context.clock() >= write_at):
                written = self._write(round_, me)
                continue
            if knows_all and self._all_are_here(round_, me):
                present = self._present({}, points, me)
                if timer.is_due(present, me.node, self.context.clock()):
                    return self._forward(self._seal(round_, present))
            if schedule.take_decision(self.context.clock()):
                if timer.is_due(self._present(rows, points, me), me.node, self.context.clock()):
                    schedule.read_now(self.context.clock())
                schedule.has_decided(self.context.clock(), timer.next_change)
            if schedule.should_read(self.context.clock()):
                read = self._read_all()
                if read is not None:
                    current, roster = read
                    if current.is_newer_than(round_) or has_gone_back(current, round_):
                        return self._forward(self.rows.restore(current, round_))
                    if written and roster.get(me.node, {}).get("incarnation") != me.incarnation:
                        written, write_at = False, self.context.clock()  # the row is gone
                    points.update(roster)
                    rows = {node: Member.from_value(value) for node, value in roster.items()}
                    present = self._present(rows, points, me, confirmed=True)
                    if timer.is_due(present, me.node, self.context.clock()):
                        if (later := self.heartbeat.round()) >= round_.number:
                            return self._forward(self._wait_for_restored(round_, later))
                        return self._forward(
                            self._seal(round_, drop_unresponsive(round_, present, me.node, self.context.limits))
                        )
                schedule.has_read(self.context.clock(), timer.next_change)
                continue
            left = schedule.seconds_left(self.context.clock())
            if self.sleeper.wait(left if written else max(0.0, min(left, write_at - self.context.clock()))):
                schedule.hub_received()
        return self._forward(newer)

    def wait_beside(self, round_: Round, me: Member) -> Round:
        """Wait as a spare beside a running round until its row has changed, and return the new version."""
        first = round_.members[0]
        purpose = f"rank 0 of round {round_.number}"
        logged: tuple[str, ...] = ()
        stale = StaleHeartbeat(self.heartbeat)
        pause, longest = _ALONE_SECONDS
        dial_at = self.context.clock()
        read_at = dial_at + _CHECK_SECONDS
        while (newer := self.context.latest.after(round_)) is None:
            now = self.context.clock()
            if self.watch.link is not None and self.watch.link.broken:
                if self.watch.link.refused:
                    self._refresh_key()
                self.watch.close()
                dial_at, read_at = now + pause, now
            if now >= dial_at and self.watch.connect(first, round_, me, purpose) is not None:
                dial_at, read_at = now + pause, now
            link = self.watch.link
            if link is not None and link.unreachable_from not in ((), logged):
                logged = link.unreachable_from
                _LOG.warning(
                    "Round %d makes no room for %s (%s), which %s cannot reach. %s",
                    round_.number, me.node, format_address(me.host, me.hub_port), ", ".join(logged),
                    self.reachability.advice,
                )  # fmt: skip
            # An accepted connection shows nothing: the kernel accepts for a process that is frozen.
            answered = link is not None and link.answered
            if answered:
                stale.reset()
            if self._must_read() or self.context.clock() >= read_at:
                current = self.rows.read_round()
                if current.is_newer_than(round_):
                    return self._forward(current)
                if not answered:
                    if stale.check():
                        return self._give_up(round_, me)
                    pause = min(longest, pause * 1.5)
                read_at = self.context.clock() + (_CHECK_SECONDS if answered else pause)
            else:
                wake_at = read_at if link is not None else min(read_at, dial_at)
                self.sleeper.wait(max(0.0, wake_at - self.context.clock()))
        return self._forward(newer)

    def _knows_all(self, round_: Round, me: Member, known: Mapping[str, Member] | Roster) -> bool:
        """Return whether the rows show this node nothing that it does not know.

        It was rank 0 of the round before, which has lost nobody, and has written the open round itself. No later round
        has run then, and the compare-and-swap of the seal fails where the row has changed since.
        """
        lost_nobody = round_.previous[:1] == (me.node,) and {*round_.previous} == {*known}
        return lost_nobody and self.rows.has_written(round_)

    def _all_are_here(self, round_: Round, me: Member) -> bool:
        """Return whether all nodes that the open round expects are connected to this node's hub as candidates."""
        if not self.rows.has_written(round_):  # a read since has found another version
            return False
        here = {member.node for member in self.hub.candidates() if member.round == round_.number}
        return {*round_.expected} <= here | {me.node}

    def _write(self, round_: Round, me: Member) -> bool:
        """Write this node's row, unless the round changes meanwhile."""
        return self.rows.write_member(me, lambda: self.context.latest.after(round_) is not None)

    def _present(
        self, rows: Mapping[str, Member], points: MeetingPoints, me: Member, *, confirmed: bool = False
    ) -> list[Member]:
        """Return all nodes, by what they have sent to this node's hub or, for the others, by their rows.

        Args:
            rows: rows of the nodes, as they were read last.
            points: where nodes meet.
            me: this node.
            confirmed: whether to leave out nodes that have no row of the same incarnation.
        """
        left = {row.incarnation for row in rows.values() if row.state == "left"}
        known = {node: replace(row, state="left") if points.is_gone(row) else row for node, row in rows.items()}
        here = {member.node: member for member in (*self.hub.candidates(), me) if member.incarnation not in left}
        if confirmed:
            incarnations = {row.incarnation for row in rows.values()}
            here = {node: row for node, row in here.items() if row.incarnation in incarnations or row is me}
        return [*{**known, **here}.values()]

    def _meet(self, points: MeetingPoints, round_: Round, me: Member, schedule: ReadSchedule) -> bool:
        """Connect to the current meeting point; return whether this node should look after the round."""
        watch = self.watch
        if watch.link is not None and watch.member is not None and watch.link.broken:
            if watch.link.refused and self._refresh_key():
                schedule.read_now(self.context.clock())  # the same hub accepts this node now
            elif points.connection_broke(watch.member, answered=watch.link.answered):
                schedule.read_now(self.context.clock())
            watch.close()
        purpose = f"where the nodes of round {round_.number} meet"
        point = points.choose()
        while point is not None and (refused := watch.connect(point, round_, me, purpose)) is not None:
            was_known = points.connect_failed(point, refused=refused)
            if was_known or not refused:
                schedule.read_now(self.context.clock())
            if not refused:
                break  # the attempt took seconds: write this node's row before the next one
            point = points.choose()
        if point is None:
            watch.close()
        if self._must_read():
            schedule.read_now(self.context.clock())
        link = watch.link
        if link is not None and link.called:
            link.called = False
            schedule.candidate_came()
        return link is None or link.position is not None or (points.is_first and self.hub.should_seal())

    def _read_all(self) -> tuple[Round, Roster] | None:
        """Read all rows; ``None`` while the table is unavailable, since hubs may still send changes."""
        try:
            return self.rows.read_all()
        except TableUnavailable as error:
            _LOG.warning("The table is unavailable (%s); reading again later.", error)
            return None

    def _refresh_key(self) -> bool:
        """Read the run's key again, as a hub holds another one; return whether it has changed."""
        try:
            return self.rows.refresh_key()
        except TableUnavailable as error:
            _LOG.warning("The table is unavailable (%s); reading the run's key again later.", error)
            return False

    def _wait_for_restored(self, round_: Round, later: int) -> Round:
        """Wait until a node of a later round has written its row again, or write it where none of them lives.

        Args:
            round_: open round that the row holds.
            later: number of the later round, which has written its heartbeat.
        """
        _LOG.warning(
            "The table's row holds round %d (open), but round %d has run: rows went back in time or are gone. Waiting "
            "for a node of that round.",
            round_.number,
            later,
        )
        self.heartbeat.nudge()
        stale = StaleHeartbeat(self.heartbeat)
        while (newer := self.context.latest.after(round_)) is None:
            if stale.check():
                return self.rows.restore(round_, Round(later, "sealed"))
            self.sleeper.wait(self.heartbeat.interval / 2)
            if (current := self.rows.read_round()).is_newer_than(round_):
                return current
        return newer

    def _seal(self, round_: Round, members: Sequence[Member]) -> Round:
        sealed = seal(round_, members, self.context.limits)
        try:
            written = self.rows.replace_round(sealed)
        except ValueTooLarge as error:
            _LOG.error("Round %d cannot be sealed: %s", round_.number, error)
            message = (
                f"A round of {len(sealed.members)} nodes does not fit the table: {error} Lower max_instance_count, or "
                "give the nodes shorter names."
            )
            sealed = replace(round_, state="failed", message=message, exit_code=1)
            written = self.rows.replace_round(sealed)
        if written:
            names = {member.node for member in sealed.members}
            for text in describe_partitions(candidates(round_, members), names):
                _LOG.warning("Round %d is sealed %s", round_.number, text)
            return sealed
        _LOG.info("Another node has changed round %d first.", round_.number)
        return self.rows.read_round()

    def _give_up(self, round_: Round, me: Member) -> Round:
        _LOG.warning("Round %d has stopped writing its heartbeat; it is reopened without its members.", round_.number)
        everyone = [member.node for member in round_.members]
        reason = f"no sign of life from {round_.members[0].node}"
        next_ = reopened(round_, reason, lost=everyone, waiting=[me.node])
        return self._forward(next_ if self.rows.end_round(round_.number, next_) else self.rows.read_round())

    def _forward(self, round_: Round) -> Round:
        """Send a version of the round to the nodes at this node's hub, and to the hub that it is connected to."""
        self.hub.publish(round_)
        self.watch.forward(round_)
        return round_

    def _must_read(self) -> bool:
        """Return, once, whether a hub has received that the row has changed, but not to what."""
        return self.watch.take_read_request() | self.hub.take_read_request()
