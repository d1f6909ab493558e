"""Which node's hub is the desk, where nodes meet that wait for an open round, and when a node looks at the rows itself.

Decisions without input and output, by what one node knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from azureml_elastic.node.rendezvous.state.round import Limits, Member, Round, candidates
from azureml_elastic.node.rendezvous.state.row_keys import is_landmark

__all__ = ["MeetingPoints", "ReadSchedule", "in_time"]

_POLL_SECONDS = (0.1, 2.0)
"""The first and the longest pause between two looks of a node that looks after the round."""

_WATCH_SECONDS = (10.0, 60.0)
"""The same for a node that will be told, in case that whoever should tell it is mistaken."""

_GATHER_SECONDS = 0.02
"""Between two decisions about those that have come to this node's hub: many come at once."""

_TRIES = 3
"""How often a hub that can be reached may break off before this node takes another one."""

_MOST_UNREACHABLE = 2
"""How many machines that do not answer a node dials before it goes without a desk."""


class MeetingPoints:
    """The hubs that one node knows of, in the order in which it would take them for its desk.

    In the first round those are landmarks first, then others, by name; and a node that still imports will do, because
    its hub listens already. In a later one, survivors come first, whose order is known to everybody without a read.

    Args:
        round_: the open round.
        me: this node.
        known: other nodes: the members of the round before, or rows as they were read.
    """

    def __init__(self, round_: Round, me: Member, known: Iterable[Member] | Mapping[str, Mapping[str, Any]]) -> None:
        self._round = round_
        self._me = me
        self._ranks = {node: rank for rank, node in enumerate(round_.previous)}
        self._breaks: dict[str, int] = {}
        self._shunned: set[str] = set()
        self._gone: set[str] = set()
        self._unreachable: set[str] = set()
        self.take(known)

    def take(self, known: Iterable[Member] | Mapping[str, Mapping[str, Any]]) -> None:
        """Replace what is known about other nodes."""
        self._known: dict[str, Member | Mapping[str, Any]] = (
            dict(known) if isinstance(known, Mapping) else {member.node: member for member in known}
        )
        self._order = sorted(self._known, key=self._key)

    @property
    def first(self) -> bool:
        """Whether this node's own hub comes before those of all others that it knows of."""
        first = next(self._eligible(), None)
        return first is None or self._key(self._me.node) < self._key(first.node)

    def choose(self) -> Member | None:
        """Return the node to watch, ``None`` if this one is left to itself.

        The first of all watches nobody, but for one case: others may have met elsewhere before it came, which can
        happen in the first round only. It watches one of them, so that they learn of it. Dialling a machine that does
        not answer takes seconds, so a node that has met a few of those would rather look at the rows.
        """
        if len(self._unreachable) >= _MOST_UNREACHABLE:
            return None
        for member in self._eligible():
            if self._key(member.node) < self._key(self._me.node):
                return member
            if self._ranks or self._unreachable:
                return None
            if member.state == "waiting":
                return member
        return None

    def broke(self, member: Member, *, heard: bool) -> bool:
        """Take note that the connection to this node's hub has ended, and return whether it is given up.

        Args:
            member: the node.
            heard: whether its hub had said anything; if not, the port is not that hub's any more.
        """
        count = self._breaks[member.incarnation] = self._breaks.get(member.incarnation, 0) + 1
        if not heard:
            self._gone.add(member.incarnation)
        if not heard or count >= _TRIES:
            self._shunned.add(member.incarnation)
        return self._shuns(member)

    def unreachable(self, member: Member, *, refused: bool) -> bool:
        """Take note that this node's hub cannot be reached, and return whether it could be before.

        Args:
            member: the node.
            refused: whether its machine says that nobody listens there: then the process has ended, whatever its row
                says, because a hub listens for as long as its node lives.
        """
        self._shunned.add(member.incarnation)
        (self._gone if refused else self._unreachable).add(member.incarnation)
        return member.incarnation in self._breaks

    def gone(self, member: Member) -> bool:
        """Return whether this node has ended, or is not to be expected: it is not there and cannot be reached."""
        there = member.state == "waiting" and member.round == self._round.number
        return member.incarnation in self._gone or (member.incarnation in self._unreachable and not there)

    def _key(self, node: str) -> tuple[int, bool, str]:
        return self._ranks.get(node, len(self._ranks)), not is_landmark(node), node

    def _eligible(self) -> Iterator[Member]:
        """Yield all other nodes whose hub may serve, in order."""
        for node in self._order:
            known = self._known[node]
            if isinstance(known, Mapping):
                known = self._known[node] = Member.from_value(known)
            if node == self._me.node or not known.hub_port or known.state == "left" or self._shuns(known):
                continue
            first_round = self._round.number == 1
            if first_round or node in self._ranks or (known.state == "waiting" and known.round == self._round.number):
                yield known

    def _shuns(self, member: Member) -> bool:
        return member.incarnation in self._shunned


class ReadSchedule:
    """When one node that waits for an open round looks at the rows, by its own monotonic clock.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._leads = False
        self._looked = now - _POLL_SECONDS[0]
        self._poll = _POLL_SECONDS[0]
        self._watch = _WATCH_SECONDS[0]
        self._weighed = now - _GATHER_SECONDS
        self._news = True
        self._look_at = now + self._watch

    def lead(self, leads: bool, now: float) -> None:
        """Say whether this node looks after the round; one that begins to looks at once."""
        if leads and not self._leads:
            self._poll = _POLL_SECONDS[0]
            self._look_at = now
        self._leads = leads

    def called(self) -> None:
        """Say that somebody has come whom only the rows name: look again soon."""
        self._poll = _POLL_SECONDS[0]
        self._look_at = min(self._look_at, self._looked + self._poll)

    def hurry(self, now: float) -> None:
        """Say that what was known has changed: look at once."""
        self._look_at = min(self._look_at, now)

    def woken(self) -> None:
        """Say that something may have happened at this node's hub."""
        self._news = True

    def time_to_weigh(self, now: float) -> bool:
        """Return whether to decide by what this node's hub was told; at most once for each time of asking."""
        if not self._leads or not self._news or now < self._weighed + _GATHER_SECONDS:
            return False
        self._weighed, self._news = now, False
        return True

    def time_to_look(self, now: float) -> bool:
        """Return whether to look at the rows."""
        return now >= self._look_at

    def looked(self, now: float, next_look: float) -> None:
        """Say that this node has looked.

        Args:
            now: monotonic seconds.
            next_look: seconds after which time alone may change the decision.
        """
        self._looked = now
        self._look_at = now + min(next_look, self._poll if self._leads else self._watch)
        if self._leads:
            self._poll = min(self._poll * 1.5, _POLL_SECONDS[1])
        else:
            self._watch = min(self._watch * 2, _WATCH_SECONDS[1])

    def weighed(self, now: float, next_look: float) -> None:
        """Say that this node has decided by what its hub was told; see :meth:`looked`."""
        self._look_at = min(self._look_at, now + next_look)

    def rest(self, now: float) -> float:
        """Return the seconds until there is something to do again, if nobody wakes the node up."""
        until = self._look_at
        if self._leads and self._news:
            until = min(until, self._weighed + _GATHER_SECONDS)
        return max(0.0, until - now)


def in_time(round_: Round, members: Iterable[Member], me: str, limits: Limits) -> list[Member]:
    """Return the rows with which a node seals whose turn it is: without those that have let their turn pass.

    They are dead, or hang, or are slow. In a round they would have the first ranks, on which all others depend; left
    out, one that is only slow waits beside the round, which makes room for it. Where the minimum cannot be reached
    without them, they are let in.

    Args:
        round_: the open round.
        members: all rows.
        me: the node that seals.
        limits: node counts.
    """
    rows = list(members)
    names = [member.node for member in candidates(round_, rows, limits)]
    passed = set(names[: names.index(me)] if me in names else names)
    others = [member for member in rows if member.node not in passed]
    return others if len(candidates(round_, others, limits)) >= limits.minimum else rows
