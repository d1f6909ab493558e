"""Where a node waits for a place: for the seal of an open round, or as a spare beside a running one.

Nodes that wait for an open round meet at one hub, the *desk*, and say there what they are. The desk tells the first of
them that it should seal; that one, and one more in case it dies, look at the rows of the table. All others are told the
sealed round by the desk and read nothing. Which hub is the desk needs no agreement: each node takes the first one that
it knows of and can reach, one that learns of an earlier one moves there, and whoever is told something tells it to
those at its own hub.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import TableUnavailable, ValueTooLarge
from azureml_elastic.node.host.addresses import place
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.hub.watch import Watch
from azureml_elastic.node.rendezvous.join.meeting_point import MeetingPoints, ReadSchedule, in_time
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.member_selection import in_the_way
from azureml_elastic.node.rendezvous.state.round import Limits, Member, Round, SealTimer, candidates, reopened, seal
from azureml_elastic.node.rendezvous.state.round_codec import newer, pack
from azureml_elastic.node.rendezvous.state.rows import Roster, Rows
from azureml_elastic.node.rendezvous.table_heartbeat import TableHeartbeat

__all__ = ["Lobby"]

_LOG = logging.getLogger(__name__)

_ALONE_SECONDS = (0.1, 2.0)
"""The first and the longest pause of a spare that nobody tells."""

_WORD_SECONDS = 1.0
"""How long a node that knows the others only says that it wants a place, before it writes so, too."""

_TOLD_SECONDS = 20.0
"""Between two reads of a spare that rank 0's hub will tell, in case it is mistaken."""


class Lobby:
    """One node's waits. It watches the hub of a node that will be told, and reads the table only where it must.

    Args:
        rows: of the rendezvous.
        hub: this node's own, whose watchers are told what this node sees.
        witness: looked at where rank 0's hub cannot be reached.
        limits: node counts.
        timings: the patience.
        sleep: waits for some seconds or until woken, and returns whether it was woken; may raise to end the wait.
        wake: wakes the sleeper, from any thread.
        reach: takes note of hubs that cannot be reached.
        machine: that this node runs on.
    """

    def __init__(
        self,
        rows: Rows,
        hub: Hub,
        witness: TableHeartbeat,
        limits: Limits,
        timings: RendezvousTimings,
        sleep: Callable[[float], bool],
        wake: Callable[[], None],
        reach: Reachability,
        machine: Runtime | None = None,
    ) -> None:
        self._machine = machine or Runtime()
        self._reach = reach
        self._rows = rows
        self._hub = hub
        self._witness = witness
        self._limits = limits
        self._timings = timings
        self._sleep = sleep
        self._clock = self._machine.clock
        self._watch = Watch(reach, timings, wake, self._machine)

    def wait_for_seal(self, round_: Round, me: Member, known: Iterable[Member] | Roster) -> Round:
        """Ask for a place in an open round, wait until someone, perhaps this node, has moved it, and return it.

        Args:
            round_: the open one.
            me: with the round's number.
            known: other nodes: the members of the round before, or the rows as they were read last.
        """
        # In the first round nodes find each other by their rows; later they know each other, and a word will do.
        me = self._reach.marked(me)
        written = (round_.number == 1 or self._rows.said_left) and self._ask(round_, me)
        write_at = self._clock() + _WORD_SECONDS
        self._hub.stand(round_, me)
        desks = MeetingPoints(round_, me, known)
        patience = SealTimer(round_, self._limits, self._timings, self._clock)
        pace = ReadSchedule(self._clock())
        rows: dict[str, Member] = {}
        while (news := self._news(round_)) is None:
            pace.lead(self._meet(desks, round_, me, pace), self._clock())
            if (marked := self._reach.marked(me)) != me:
                me = marked
                self._hub.stand(round_, me)
                written, write_at = False, self._clock()
            lonely = self._watch.link is None and not desks.first
            if not written and (lonely or self._clock() >= write_at):
                written = self._ask(round_, me)
                continue
            if pace.time_to_weigh(self._clock()):
                if patience.time_to_seal(self._present(rows, desks, me), me.node):
                    pace.hurry(self._clock())
                pace.weighed(self._clock(), patience.next_look)
            if pace.time_to_look(self._clock()):
                look = self._look()
                if look is not None:
                    current, roster = look
                    if newer(current, round_):
                        return self._pass_on(current)
                    desks.take(roster)
                    rows = {node: Member.from_value(value) for node, value in roster.items()}
                    here = self._present(rows, desks, me)
                    if patience.time_to_seal(here, me.node):
                        return self._pass_on(self._seal(round_, in_time(round_, here, me.node, self._limits)))
                pace.looked(self._clock(), patience.next_look)
                continue
            rest = pace.rest(self._clock())
            if self._sleep(rest if written else max(0.0, min(rest, write_at - self._clock()))):
                pace.woken()
        return self._pass_on(news)

    def wait_beside(self, round_: Round, me: Member) -> Round:
        """Wait as a spare beside a running round until its row has moved, and return what it says then."""
        first = round_.members[0]
        purpose = f"rank 0 of round {round_.number}"
        makes_no_room: tuple[str, ...] = ()
        pause, longest = _ALONE_SECONDS
        sign: str | None = None
        since: float | None = None
        dial_at = self._clock()
        look_at = dial_at + _TOLD_SECONDS
        while (news := self._news(round_)) is None:
            now = self._clock()
            if self._watch.link is not None and self._watch.link.broken:
                self.leave()
                dial_at, look_at = now + pause, now
            if now >= dial_at and self._watch.begin(first, round_, me, purpose) is not None:
                dial_at, look_at = now + pause, now
            if self._watch.link is not None and self._watch.link.apart not in ((), makes_no_room):
                makes_no_room = self._watch.link.apart
                names = ", ".join(makes_no_room)
                _LOG.warning(
                    "Round %d makes no room for %s (%s), which %s cannot reach. %s",
                    round_.number, me.node, place(me.host, me.hub_port), names, self._reach.advice,
                )  # fmt: skip
            told = self._watch.link is not None and self._watch.member == first
            since = None if told else since
            if self._must_read() or self._clock() >= look_at:
                current = self._rows.read_round()
                if newer(current, round_):
                    return self._pass_on(current)
                if not told:
                    seen = self._witness.look()
                    if since is None or seen != sign:
                        sign, since = seen, self._clock()
                    elif self._clock() - since > 2 * self._timings.table_heartbeat_interval.total_seconds():
                        return self._give_up(round_, me)
                    pause = min(longest, pause * 1.5)
                look_at = self._clock() + (_TOLD_SECONDS if told else pause)
            else:
                self._sleep(max(0.0, (look_at if told else min(look_at, dial_at)) - self._clock()))
        return self._pass_on(news)

    def listen_to(self, member: Member, round_: Round, me: Member, patience: float) -> None:
        """Watch the hub of the member that should end a broken round; :meth:`heard` tells what it says.

        Args:
            member: that should.
            round_: the broken one.
            me: this node.
            patience: seconds to connect in.
        """
        self._watch.begin(member, round_, me, "the next to end the round", patience)

    def heard(self, round_: Round) -> bool:
        """Return whether the round is known to have moved."""
        return self._news(round_) is not None

    def leave(self) -> None:
        """Stop watching."""
        self._watch.end()

    def _ask(self, round_: Round, me: Member) -> bool:
        """Write that this node wants a place, unless it hears meanwhile that the round has moved."""
        return self._rows.write_member(me, lambda: self._news(round_) is not None)

    def _present(self, rows: Mapping[str, Member], desks: MeetingPoints, me: Member) -> list[Member]:
        """Return all nodes: as their rows say or, newer than those, as they say at this node's hub."""
        left = {row.incarnation for row in rows.values() if row.state == "left"}
        known = {node: replace(row, state="left") if desks.gone(row) else row for node, row in rows.items()}
        here = {member.node: member for member in (*self._hub.candidates(), me) if member.incarnation not in left}
        return [*{**known, **here}.values()]

    def _meet(self, desks: MeetingPoints, round_: Round, me: Member, pace: ReadSchedule) -> bool:
        """Watch the desk that this node would take now; return whether this node looks after the round."""
        if self._watch.link is not None and self._watch.member is not None and self._watch.link.broken:
            if desks.broke(self._watch.member, heard=self._watch.link.heard):
                pace.hurry(self._clock())
            self.leave()
        purpose = f"where the nodes of round {round_.number} meet"
        desk = desks.choose()
        while desk is not None and (refused := self._watch.begin(desk, round_, me, purpose)) is not None:
            known = desks.unreachable(desk, refused=refused)
            if known or not refused:
                pace.hurry(self._clock())
            if not refused:
                break  # that took seconds: first say so, then go on
            desk = desks.choose()
        if desk is None:
            self.leave()
        if self._must_read():
            pace.hurry(self._clock())
        link = self._watch.link
        if link is not None and link.called:
            link.called = False
            pace.called()
        return link is None or link.place is not None or (desks.first and self._hub.should_seal())

    def _look(self) -> tuple[Round, Roster] | None:
        """Read all rows; ``None`` while the table is away, because the hubs may tell what it does not."""
        try:
            return self._rows.read_all_now()
        except TableUnavailable as error:
            _LOG.warning("The table is away (%s); looking again.", error)
            return None

    def _seal(self, round_: Round, members: Sequence[Member]) -> Round:
        sealed = seal(round_, members, self._limits)
        try:
            written = self._rows.replace_round(sealed)
        except ValueTooLarge as error:
            _LOG.error("Round %d cannot be sealed: %s", round_.number, error)
            message = (
                f"A round of {len(sealed.members)} nodes does not fit the table: {error} Lower max_instance_count, or "
                "give the nodes shorter names."
            )
            sealed = replace(round_, state="failed", message=message, exit_code=1)
            written = self._rows.replace_round(sealed)
        if written:
            for told in in_the_way(candidates(round_, members), {member.node for member in sealed.members}):
                _LOG.warning("Round %d is sealed %s", round_.number, told)
            return sealed
        _LOG.info("Another node was first to move round %d.", round_.number)
        return self._rows.read_round()

    def _give_up(self, round_: Round, me: Member) -> Round:
        _LOG.warning("Round %d gives no sign of life; it is given up.", round_.number)
        everyone = [member.node for member in round_.members]
        reason = f"no sign of life from {round_.members[0].node}"
        next_ = reopened(round_, reason, lost=everyone, waiting=[me.node])
        if self._rows.end_round(round_.number, next_):
            return self._pass_on(next_)
        return self._pass_on(self._rows.read_round())

    def _news(self, round_: Round) -> Round | None:
        """Return the newest version of the row that this node has been told, if it is newer than this one."""
        for told in (self._watch.link.news if self._watch.link is not None else None, self._hub.newest):
            if told is not None:
                self._rows.heard(told)
        newest = self._rows.newest
        return newest if newest is not None and newer(newest, round_) else None

    def _pass_on(self, round_: Round) -> Round:
        """Tell those at this node's hub, and the desk if it was not the desk that told it."""
        self._hub.changed(round_)
        link = self._watch.link
        if link is not None and newer(round_, link.news):
            link.send({"op": "changed", "row": pack(round_)})
        return round_

    def _must_read(self) -> bool:
        """Return, once for each time, whether a hub knows that the row has moved, but not to what."""
        link, hinted = self._watch.link, self._hub.take_hint()
        if link is None or not link.changed:
            return hinted
        link.changed = False
        return True
