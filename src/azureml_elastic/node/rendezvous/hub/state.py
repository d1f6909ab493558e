"""State of a hub without its I/O: the round's row, the waiting nodes, and the candidates that should seal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from azureml_elastic.ipc import Connection
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.core.sealing import candidates
from azureml_elastic.node.rendezvous.hub.watchers import Watcher, Watchers

__all__ = ["HubState", "HubView", "SealQueue"]

_AHEAD = 2
"""Number of candidates that look after the round: the one that should seal it, and the one that takes over."""


_MAX_DEBOUNCES = 4
"""Largest number of debounces for which a spare waits while further ones come."""


@dataclass(frozen=True)
class HubView:
    """State of a hub's round.

    Args:
        lost: members that are gone.
        absent: those of them that have never connected.
        waiting_since: spares that can be expected to join, with the monotonic seconds at which they began to wait.
        was_given_up: whether members have ended their connections because this process itself did not run.
    """

    lost: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    waiting_since: Mapping[str, float] = field(default_factory=dict)
    was_given_up: bool = False

    @property
    def waiting(self) -> frozenset[str]:
        """Names of these spares."""
        return frozenset(self.waiting_since)

    def spares(self, now: float, debounce: float) -> frozenset[str]:
        """Return the spares to make room for, once none has come for the debounce, or the first has waited for four."""
        waits = [now - since for since in self.waiting_since.values()]
        due = waits and (min(waits) >= debounce or max(waits) >= _MAX_DEBOUNCES * debounce)
        return self.waiting if due else frozenset()


class SealQueue:
    """The first few candidates of an open round.

    Rows of the table decide which node seals. A hub only selects the nodes that read them, so that not all do: the
    first two in the order of ranks and, because strikes and unreachable pairs may exclude these, the first two without.

    Args:
        round_: open round.
    """

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.first: list[Member] = []

    def add(self, members: Iterable[Member]) -> None:
        """Add candidates; those of other rounds are ignored."""
        ranked = candidates(self.round, {member.node: member for member in (*self.first, *members)}.values())
        flawless = [member for member in ranked if not member.strikes and not member.unreached]
        ahead = {member.node for member in (*ranked[:_AHEAD], *flawless[:_AHEAD])}
        self.first = [member for member in ranked if member.node in ahead]

    def remove(self, node: str) -> bool:
        """Remove a candidate; return whether it was one of the first, so that the others must be added again."""
        kept = [member for member in self.first if member.node != node]
        was_first = len(kept) < len(self.first)
        self.first = kept
        return was_first


class HubState:
    """The newest version of the round's row and the waiting nodes of one hub. Not thread-safe: the hub holds its lock.

    Args:
        clock: clock in monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.watchers = Watchers(clock)
        self._published: Round | None = None
        self._own: Member | None = None
        self._queue: SealQueue | None = SealQueue(Round())  # nodes meet at this hub while its own node still imports
        self._requested = 0

    def publish(self, round_: Round) -> bool:
        """Record a version of the row; return whether it is newer than the one before."""
        if not round_.is_newer_than(self._published):
            return False
        self._published = round_
        self._queue = SealQueue(round_) if round_.state == "open" else None
        self._requeue()
        return True

    def newer_than(self, seen: Round) -> Round | None:
        """Return the newest version of the row if a node that has seen this one has missed it."""
        published = self._published
        return published if published is not None and published.is_newer_than(seen) else None

    def is_first_sign_of(self, sealed: Round) -> bool:
        """Return, once for each round, whether a member is in a sealed round that this hub does not know of."""
        unknown = sealed.is_newer_than(self._published) and sealed.number > self._requested
        self._requested = max(sealed.number, self._requested)
        return unknown

    def add_own(self, round_: Round, me: Member) -> None:
        """Add the hub's own node as a candidate of an open round."""
        self._own = me
        self.publish(round_)
        if self._queue is not None:
            self._queue.add([me])

    def watch(self, node: str, watcher: Watcher) -> None:
        """Add a waiting node, or its new state."""
        self.watchers.add(node, watcher)
        candidate = watcher.candidacy
        if candidate is None:
            return
        number = self._queue.round.number if self._queue is not None else 0
        if candidate.round > number and Round(candidate.round).is_newer_than(self._published):
            # The hub's own node does not have that round yet, nor its survivors: the order is by name until then.
            self._queue = SealQueue(Round(candidate.round))
        if self._queue is not None:
            self._queue.add([candidate])

    def leave(self, node: str, connection: Connection) -> bool:
        """Remove a waiting node whose connection has ended; return whether the queue has changed."""
        if not self.watchers.remove(node, connection) or self._queue is None or not self._queue.remove(node):
            return False
        self._requeue()
        return True

    def should_seal(self) -> bool:
        """Return whether the hub's own node is among the first in the queue."""
        own = self._own.node if self._own is not None else None
        return self._queue is not None and any(member.node == own for member in self._queue.first)

    def take_positions(self) -> list[tuple[Connection, int]]:
        """Return the positions to send: always the first one, others where they are new."""
        positions = []
        for position, member in enumerate(self._queue.first if self._queue is not None else ()):
            watcher = self.watchers.nodes.get(member.node)
            if watcher is not None and (position == 0 or watcher.connection.state.get("position") != position):
                watcher.connection.state["position"] = position
                positions.append((watcher.connection, position))
        return positions

    def _requeue(self) -> None:
        if self._queue is not None:
            self._queue.add([*self.watchers.candidates(), *([self._own] if self._own else [])])
