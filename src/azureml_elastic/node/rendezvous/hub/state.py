"""What one hub knows of the round's row and of its watchers, and whom of these it asks to look after an open round."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from azureml_elastic.ipc import Connection
from azureml_elastic.node.rendezvous.hub.watchers import Watcher, Watchers
from azureml_elastic.node.rendezvous.state.round import Member, Round, candidates
from azureml_elastic.node.rendezvous.state.round_codec import newer

__all__ = ["HubState", "Line"]

_AHEAD = 2
"""How many of a hub's candidates look after the round: the one that should seal it, and the one that takes over."""


class Line:
    """The first few candidates of an open round.

    The rows of the table decide who seals. A hub only says who should look at them, so that not everybody does: the
    first two in the order of ranks and, because strikes and gaps may cost these their places, the first two without.

    Args:
        round_: the open round.
    """

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.first: list[Member] = []

    def add(self, members: Iterable[Member]) -> None:
        """Take in candidates; those of other rounds do not count."""
        ranked = candidates(self.round, {member.node: member for member in (*self.first, *members)}.values())
        spotless = [member for member in ranked if not member.strikes and not member.unreached]
        ahead = {member.node for member in (*ranked[:_AHEAD], *spotless[:_AHEAD])}
        self.first = [member for member in ranked if member.node in ahead]

    def remove(self, node: str) -> bool:
        """Take out a candidate; return whether it was one of the first, so that the others must be added again."""
        kept = [member for member in self.first if member.node != node]
        was_first = len(kept) < len(self.first)
        self.first = kept
        return was_first


class HubState:
    """What one hub knows about the row and about those that watch it. Not thread-safe: the hub has the lock.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.watchers = Watchers(clock)
        self.newest: Round | None = None
        self._own: Member | None = None
        self._line: Line | None = Line(Round())  # nodes meet at this hub while this node still imports
        self._hinted = 0

    def learn(self, round_: Round) -> bool:
        """Take note of a version of the row; return whether it is a newer one."""
        if not newer(round_, self.newest):
            return False
        self.newest = round_
        self._line = Line(round_) if round_.state == "open" else None
        self._line_up_all()
        return True

    def missed(self, seen: Round) -> Round | None:
        """Return the newest version of the row if it is newer than what somebody says that it has seen."""
        return self.newest if self.newest is not None and newer(self.newest, seen) else None

    def hint(self, sealed: Round) -> bool:
        """Return, once for each round, whether a member is in a sealed round that this hub was never told."""
        unheard = newer(sealed, self.newest) and sealed.number > self._hinted
        self._hinted = max(sealed.number, self._hinted)
        return unheard

    def stand(self, round_: Round, me: Member) -> None:
        """Take note that this hub's own node is a candidate of an open round."""
        self._own = me
        self.learn(round_)
        if self._line is not None:
            self._line.add([me])

    def watch(self, node: str, watcher: Watcher) -> None:
        """Take in a watcher, or its newer word."""
        self.watchers.add(node, watcher)
        candidate = watcher.candidacy
        if candidate is None:
            return
        number = self._line.round.number if self._line is not None else 0
        if candidate.round > number and newer(Round(candidate.round), self.newest):
            # This node has not heard of that round yet, nor of its survivors: whoever is first by name looks at it.
            self._line = Line(Round(candidate.round))
        if self._line is not None:
            self._line.add([candidate])

    def leave(self, node: str, connection: Connection) -> bool:
        """Take out a watcher whose connection has ended; return whether that has changed the line."""
        if not self.watchers.remove(node, connection) or self._line is None or not self._line.remove(node):
            return False
        self._line_up_all()
        return True

    def should_seal(self) -> bool:
        """Return whether this hub's own node is among the first in line."""
        own = self._own.node if self._own is not None else None
        return self._line is not None and any(member.node == own for member in self._line.first)

    def calls(self) -> list[tuple[Connection, int]]:
        """Return whom to tell its place: the first in line always, others when it is a new one."""
        calls = []
        for place, member in enumerate(self._line.first if self._line is not None else ()):
            watcher = self.watchers.get(member.node)
            if watcher is not None and (place == 0 or watcher.connection.state.get("place") != place):
                watcher.connection.state["place"] = place
                calls.append((watcher.connection, place))
        return calls

    def _line_up_all(self) -> None:
        if self._line is not None:
            self._line.add([*self.watchers.candidates(), *([self._own] if self._own else [])])
