"""Where a node waits for a place: for the seal of an open round, or as a spare beside a running one.

Nodes that wait for an open round meet at one hub, the *desk*, and say there what they are. The desk tells the first of
them that it should seal; that one, and one more in case it dies, look at the rows of the table. All others are told the
sealed round by the desk and read nothing. Which hub is the desk needs no agreement: each node takes the first one that
it knows of and can reach, one that learns of an earlier one moves there, and whoever is told something tells it to
those at its own hub.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from azureml_elastic.errors import TableUnavailable, ValueTooLarge
from azureml_elastic.node.rendezvous.desks import Desks, Pace, in_time
from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.link import Link
from azureml_elastic.node.rendezvous.machine import Machine
from azureml_elastic.node.rendezvous.news import newer, pack
from azureml_elastic.node.rendezvous.round import Limits, Member, Patience, Round, reopened, seal
from azureml_elastic.node.rendezvous.rows import Roster, Rows
from azureml_elastic.node.rendezvous.witness import Witness
from azureml_elastic.spec import RendezvousTimings

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
        machine: that this node runs on.
    """

    def __init__(
        self,
        rows: Rows,
        hub: Hub,
        witness: Witness,
        limits: Limits,
        timings: RendezvousTimings,
        sleep: Callable[[float], bool],
        wake: Callable[[], None],
        machine: Machine | None = None,
    ) -> None:
        self._machine = machine or Machine()
        self._rows = rows
        self._hub = hub
        self._witness = witness
        self._limits = limits
        self._timings = timings
        self._sleep = sleep
        self._wake = wake
        self._clock = self._machine.clock
        self._link: Link | None = None
        self._watched: Member | None = None
        self._greeting: Mapping[str, Any] = {}

    def wait_for_seal(self, round_: Round, me: Member, known: Iterable[Member] | Roster) -> Round:
        """Ask for a place in an open round, wait until someone, perhaps this node, has moved it, and return it.

        Args:
            round_: the open one.
            me: with the round's number.
            known: other nodes: the members of the round before, or the rows as they were read last.
        """
        # In the first round nodes find each other by their rows; later they know each other, and a word will do.
        written = round_.number == 1 and self._ask(round_, me)
        write_at = self._clock() + _WORD_SECONDS
        self._hub.stand(round_, me)
        desks = Desks(round_, me, known)
        patience = Patience(round_, self._limits, self._timings, self._clock)
        pace = Pace(self._clock())
        rows: dict[str, Member] = {}
        while (news := self._news(round_)) is None:
            pace.lead(self._meet(desks, round_, me, pace), self._clock())
            lonely = self._link is None and not desks.first
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
        greeting = _greeting(round_, me)
        pause, longest = _ALONE_SECONDS
        sign: str | None = None
        since: float | None = None
        dial_at = self._clock()
        look_at = dial_at + _TOLD_SECONDS
        while (news := self._news(round_)) is None:
            now = self._clock()
            if self._link is not None and self._link.broken:
                self.leave()
                dial_at, look_at = now + pause, now
            if now >= dial_at and self._watch(first, greeting) is not None:
                dial_at, look_at = now + pause, now
            told = self._link is not None and self._watched == first
            since = None if told else since
            if self._must_read() or self._clock() >= look_at:
                current = self._rows.read_round()
                if newer(current, round_):
                    return self._pass_on(current)
                if not told:
                    seen = self._witness.look()
                    if since is None or seen != sign:
                        sign, since = seen, self._clock()
                    elif self._clock() - since > 2 * self._timings.witness_interval.total_seconds():
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
        self._watch(member, _greeting(round_, me), patience)

    def heard(self, round_: Round) -> bool:
        """Return whether the round is known to have moved."""
        return self._news(round_) is not None

    def leave(self) -> None:
        """Stop watching."""
        if self._link is not None:
            self._link.close()
            self._link = self._watched = None

    def _ask(self, round_: Round, me: Member) -> bool:
        """Write that this node wants a place, unless it hears meanwhile that the round has moved."""
        return self._rows.write_member(me, lambda: self._news(round_) is not None)

    def _present(self, rows: Mapping[str, Member], desks: Desks, me: Member) -> list[Member]:
        """Return all nodes: as their rows say or, newer than those, as they say at this node's hub."""
        left = {row.incarnation for row in rows.values() if row.state == "left"}
        known = {node: replace(row, state="left") if desks.gone(row) else row for node, row in rows.items()}
        here = {member.node: member for member in (*self._hub.candidates(), me) if member.incarnation not in left}
        return [*{**known, **here}.values()]

    def _meet(self, desks: Desks, round_: Round, me: Member, pace: Pace) -> bool:
        """Watch the desk that this node would take now; return whether this node looks after the round."""
        if self._link is not None and self._watched is not None and self._link.broken:
            if desks.broke(self._watched, heard=self._link.heard):
                pace.hurry(self._clock())
            self.leave()
        desk, greeting = desks.choose(), _greeting(round_, me)
        while desk is not None and (refused := self._watch(desk, greeting)) is not None:
            if desks.unreachable(desk, refused=refused):
                pace.hurry(self._clock())
            desk = desks.choose()
        if desk is None:
            self.leave()
        if self._must_read():
            pace.hurry(self._clock())
        link = self._link
        if link is not None and link.called:
            link.called = False
            pace.called()
        return link is None or link.place is not None or (desks.first and self._hub.stands_first())

    def _look(self) -> tuple[Round, Roster] | None:
        """Read all rows; ``None`` while the table is away, because the hubs may tell what it does not."""
        try:
            return self._rows.read_all_now()
        except TableUnavailable as error:
            _LOG.warning("The table is away (%s); looking again.", error)
            return None

    def _seal(self, round_: Round, members: Iterable[Member]) -> Round:
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
        for told in (self._link.news if self._link is not None else None, self._hub.newest):
            if told is not None:
                self._rows.heard(told)
        newest = self._rows.newest
        return newest if newest is not None and newer(newest, round_) else None

    def _pass_on(self, round_: Round) -> Round:
        """Tell those at this node's hub, and the desk if it was not the desk that told it."""
        self._hub.changed(round_)
        link = self._link
        if link is not None and newer(round_, link.news):
            link.send({"op": "changed", "row": pack(round_)})
        return round_

    def _must_read(self) -> bool:
        """Return, once for each time, whether a hub knows that the row has moved, but not to what."""
        link, hinted = self._link, self._hub.take_hint()
        if link is None or not link.changed:
            return hinted
        link.changed = False
        return True

    def _watch(self, member: Member, greeting: Mapping[str, Any], patience: float | None = None) -> bool | None:
        """Be told by this member's hub; ``None``, or if it cannot be reached, whether its machine has refused."""
        greeting = {**greeting, "to": member.incarnation}
        link = self._link
        same = self._watched is not None and self._watched.incarnation == member.incarnation
        if link is not None and same and not link.broken:
            if greeting != self._greeting:
                link.place = None
                link.send(greeting)
                self._watched, self._greeting = member, greeting
            return None
        self.leave()
        try:
            address = (member.host, member.hub_port)
            self._link = Link(address, greeting, self._timings, self._wake, self._machine, patience)
        except OSError as error:
            _LOG.info("The hub of %s cannot be reached: %s", member.node, error)
            return isinstance(error, ConnectionRefusedError)
        self._watched, self._greeting = member, greeting
        return None


def _greeting(round_: Round, me: Member) -> dict[str, Any]:
    """Return what to say to a hub: which version of the row this node has seen, and what it wants to be in it."""
    is_open = round_.state == "open"
    whoami = {"op": "watch", "node": me.node, "incarnation": me.incarnation, "strikes": me.strikes}
    return {**whoami, "round": round_.number, "open": is_open, "candidacy": me.to_value() if is_open else None}
