"""How a node waits for a round: at which hub it meets the others, when it reads the rows, and who still lives.

Nodes that wait for an open round meet at one hub, the *meeting point*, and send it their rows. The hub sends the first
of them that it should seal; that node, and one more in case it dies, read the rows of the table. All others receive the
sealed round from the hub and read nothing. Which hub is the meeting point needs no agreement: each node takes the first
one that it knows and can reach, moves when it learns of an earlier one, and forwards what it receives to the nodes at
its own hub.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from azureml_elastic.node.core.messages import Watch
from azureml_elastic.node.core.round import Member, Round

_ONE_IN = 32
"""One node in so many is a landmark, by a hash of its name."""

_TRIES = 3
"""Broken connections to a hub that can be reached, after which the node chooses another one."""

_MAX_UNREACHABLE = 2
"""Number of machines that do not answer, after which the node reads the rows instead of meeting others."""

_POLL_SECONDS = (0.1, 2.0)
"""First and longest pause between two reads of a node that looks after the round."""

_CHECK_SECONDS = (10.0, 60.0)
"""The same for a node to which a hub sends changes, in case the hub fails to."""

_GATHER_SECONDS = 0.02
"""Time between two decisions by what the node's hub has received, since many nodes come at once."""


def is_landmark(node: str) -> bool:
    """Return whether nodes prefer to meet at this node's hub."""
    # All processes must get the same, which hash() of a text does not give.
    return zlib.crc32(node.encode("utf-8", "surrogatepass")) % _ONE_IN == 0


def greeting_of(me: Member, round_: Round) -> Watch:
    """Return what a node sends to a hub when it waits: for the seal of an open round, or beside a sealed one.

    Args:
        me: row of the node; in an open round, that with which it wants to be a member.
        round_: newest version of the round that it has seen.
    """
    is_open = round_.state == "open"
    return Watch(round_.number, is_open, me.strikes, me.unreached, me if is_open else None)


@dataclass
class HubLink:
    """The connection of a node that waits to another one's hub.

    Args:
        greeting: what this node has sent last.
        answered: whether the hub has sent anything yet.
        position: position among the candidates that should seal, as the hub has sent it.
        received: newest version of the round that the hub has sent.
    """

    to: Member
    greeting: Watch
    answered: bool = False
    position: int | None = None
    received: Round | None = None


class MeetingPoints:
    """The hubs that one node knows, in the order in which it would choose them as its meeting point.

    In the first round the order is landmarks, then others, by name; a node that still imports qualifies, because its
    hub listens already. In a later round survivors come first, in the order of their ranks, which needs no read.

    Args:
        known: other nodes by name: the members of the round before, or rows as they were read.

    Attributes:
        late: nodes that the round waits for, as members or to save, and that had not come when the rows were read.
    """

    def __init__(self, round_: Round, me: Member, known: Mapping[str, Member | Mapping[str, Any]]) -> None:
        self.late: frozenset[str] = frozenset()
        self._round = round_
        self._me = me
        self._ranks = {node: rank for rank, node in enumerate(round_.previous)}
        self._breaks: dict[str, int] = {}
        self._excluded: set[str] = set()
        self._ended: set[str] = set()
        self._unreachable: set[str] = set()
        self._known: dict[str, Member | Mapping[str, Any]] = {}
        self.update(known)

    def update(self, known: Mapping[str, Member | Mapping[str, Any]]) -> None:
        """Take in what is known about other nodes. One whose row is gone, as in a table that was cleaned, may live."""
        self._known = {**self._known, **known}
        self._order = sorted(self._known, key=self._key)

    @property
    def is_first(self) -> bool:
        """Whether this node's own hub comes before those of all other nodes that it knows."""
        first = next(self._eligible(), None)
        return first is None or self._key(self._me.node) < self._key(first.node)

    def choose(self) -> Member | None:
        """Return the node to connect to, ``None`` for none.

        The first of all nodes connects to none, with two exceptions: in the first round others may have met elsewhere
        before it came, and it connects to one of them so that they learn of it; later, to one that is late, whose
        connection shows when its process has ended, perhaps with the one whose loss ended the round. Connecting to a
        machine that does not answer takes seconds, so after a few of them a node reads the rows instead.
        """
        if len(self._unreachable) >= _MAX_UNREACHABLE:
            return None
        is_alone = bool(self._ranks or self._unreachable)
        for member in self._eligible():
            if self._key(member.node) < self._key(self._me.node) or member.node in self.late:
                return member
            if is_alone and not self.late:
                return None
            if not is_alone and member.state == "waiting":
                return member
        return None

    def connection_broke(self, member: Member, *, answered: bool) -> None:
        """Record that the connection to a node's hub has ended; after some times the hub is not chosen again.

        Args:
            answered: whether the hub had sent anything; if not, the port belongs to another process.
        """
        count = self._breaks[member.incarnation] = self._breaks.get(member.incarnation, 0) + 1
        if not answered:
            self._ended.add(member.incarnation)
        if not answered or count >= _TRIES:
            self._excluded.add(member.incarnation)

    def connect_failed(self, member: Member, *, refused: bool) -> bool:
        """Record that a node's hub cannot be reached, and return whether it could be before.

        Args:
            refused: whether its machine refused the connection, which shows that the process has ended, since a hub
                listens for as long as its node lives.
        """
        self._excluded.add(member.incarnation)
        (self._ended if refused else self._unreachable).add(member.incarnation)
        return member.incarnation in self._breaks

    def is_gone(self, member: Member) -> bool:
        """Return whether this node has ended, or cannot be reached and neither waits for the round nor saves for it."""
        waits = member.state == "waiting" and member.round == self._round.number
        may_act = waits or member.node in self._round.finishing
        return member.incarnation in self._ended or (member.incarnation in self._unreachable and not may_act)

    def _key(self, node: str) -> tuple[int, bool, str]:
        return self._ranks.get(node, len(self._ranks)), not is_landmark(node), node

    def _eligible(self) -> Iterator[Member]:
        """Yield all other nodes whose hub qualifies, in order."""
        for node in self._order:
            known = self._known[node]
            if isinstance(known, Mapping):
                # One at a time, as they are needed: of a thousand rows a node needs one or two.
                known = self._known[node] = Member.from_value(known)
            excluded = known.incarnation in self._excluded
            if node == self._me.node or not known.hub_port or known.state == "left" or excluded:
                continue
            waits = known.state == "waiting" and known.round == self._round.number
            if waits or self._round.number == 1 or node in self._ranks or node in self.late:
                yield known


class ReadSchedule:
    """The schedule of one node, by its own monotonic clock.

    Args:
        knows_all: whether this node has written the round's row: it knows whom to expect, and they come to its hub.
    """

    def __init__(self, now: float, *, knows_all: bool = False) -> None:
        self._active = False
        self._first_read = _POLL_SECONDS[0] if knows_all else 0.0
        self._read_last = now - _POLL_SECONDS[0]
        self._poll = _POLL_SECONDS[0]
        self._check = _CHECK_SECONDS[0]
        self._decided_last = now - _GATHER_SECONDS
        self._received = True
        self._read_at = now + self._check

    def set_active(self, active: bool, now: float) -> None:
        """Set whether this node looks after the round; when that begins it reads at once, unless it knows all."""
        if active and not self._active:
            self._poll = _POLL_SECONDS[0]
            self._read_at = now + self._first_read
        self._active = active

    def candidate_came(self) -> None:
        """Read again soon: a node has come that only the rows name."""
        self._poll = _POLL_SECONDS[0]
        # Not at once: many nodes come together, and one read shows all of them.
        self._read_at = min(self._read_at, self._read_last + self._poll)

    def read_now(self, now: float) -> None:
        """Read at once: what was known has changed."""
        self._read_at = min(self._read_at, now)

    def hub_received(self) -> None:
        """Decide again soon: this node's hub may have received something."""
        self._received = True

    def take_decision(self, now: float) -> bool:
        """Return, once for each time that it is due, whether to decide by what the hub has received."""
        if not self._active or not self._received or now < self._decided_last + _GATHER_SECONDS:
            return False
        self._decided_last, self._received = now, False
        return True

    def should_read(self, now: float) -> bool:
        """Return whether to read the rows."""
        return now >= self._read_at

    def has_read(self, now: float, next_change: float) -> None:
        """Record a read; ``next_change`` is the number of seconds until time alone may change the decision."""
        self._read_last = now
        self._read_at = now + min(next_change, self._poll if self._active else self._check)
        if self._active:
            self._poll = min(self._poll * 1.5, _POLL_SECONDS[1])
        else:
            self._check = min(self._check * 2, _CHECK_SECONDS[1])

    def has_decided(self, now: float, next_change: float) -> None:
        """Record a decision by what the hub has received; for the arguments see :meth:`has_read`."""
        self._read_at = min(self._read_at, now + next_change)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until a read or a decision is due, unless the node is woken."""
        until = self._read_at
        if self._active and self._received:
            until = min(until, self._decided_last + _GATHER_SECONDS)
        return max(0.0, until - now)


class Staleness:
    """Whether the version of a row has not changed for too long, by one node's clock.

    Args:
        seconds: how long is too long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._version: str | None = None
        self._since: float | None = None

    def reset(self) -> None:
        """Begin anew with the next version that is seen."""
        self._since = None

    def see(self, version: str | None, now: float) -> bool:
        """Record a version that was read, ``None`` for none; return whether it has been the same for too long."""
        if self._since is None or version != self._version:
            self._version, self._since = version, now
            return False
        return now - self._since > self._seconds


def is_leader_unreachable(answers: Sequence[bool | None]) -> bool | None:
    """Return whether most nodes cannot reach rank 0's node, ``None`` if the answers do not show it.

    Args:
        answers: whether other members have reached rank 0's node, ``None`` for no answer. The node that queries them
            has not reached it.
    """
    if 2 * answers.count(False) > len(answers):
        return True
    return False if True in answers else None
