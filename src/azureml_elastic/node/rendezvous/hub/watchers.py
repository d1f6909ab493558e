"""The watchers of a hub, and which of them the running round should make room for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from azureml_elastic.ipc import Connection
from azureml_elastic.node.rendezvous.state.round import Member, Round

__all__ = ["HubView", "Watcher", "Watchers"]

_MISSED_SECONDS = (15.0, 240.0)
"""How long a node that has twice not come is let wait, and the longest: it doubles with each time."""


@dataclass(frozen=True)
class HubView:
    """What the hub knows about its round.

    Args:
        lost: members that are gone.
        absent: those of them that have never come.
        done: members whose workers have all ended well.
        waiting: nodes outside that want in, have a live connection, and can be expected to come.
        waiting_since: since when the first of them waits (monotonic seconds).
        waiting_latest: since when the last of them waits.
    """

    lost: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    waiting_since: float | None = None
    waiting_latest: float | None = None


@dataclass(frozen=True)
class Watcher:
    """A node that watches this hub.

    Args:
        connection: to it.
        since: when it said so last (monotonic seconds).
        beside: the sealed round beside which it waits, 0 for none.
        candidacy: what it wants to be in an open round.
        strikes: against its machine, as far as it knows.
        incarnation: of it.
        unreached: incarnations of nodes that it cannot reach.
    """

    connection: Connection
    since: float
    beside: int = 0
    candidacy: Member | None = None
    strikes: int = 0
    incarnation: str = ""
    unreached: frozenset[str] = frozenset()


class Watchers:
    """All of them, by node. Not thread-safe: the hub has the lock.

    A round that makes room breaks off its workers, which must not happen again and again for a node that then does not
    come. A live connection alone shows little: it is kept by a thread, whatever the node itself hangs in. So a node for
    which a round was reopened and that missed the seal is made room for as soon as it says that it waits beside the
    round that was sealed without it, which only its own main thread can say, after it has heard of that seal. When it
    misses that chance too, it is let wait longer each time.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watchers: dict[str, Watcher] = {}
        self._missed: dict[str, int] = {}
        self._number = 0
        self._members: frozenset[str] = frozenset()
        self._gaps: dict[str, set[str]] = {}

    def enter(self, round_: Round) -> list[tuple[Connection, list[str]]]:
        """Count who was expected in this sealed round and is not in it, and note whom its members cannot reach.

        Returns:
            The connections of those watchers that members cannot reach, each with the names of these members. They may
            have come before anybody here knew it.
        """
        members = {member.node for member in round_.members}
        missed = {node: self._missed.get(node, 0) + 1 for node in round_.expected if node not in members}
        kept = {node: count for node, count in self._missed.items() if node not in members}
        self._missed = {**kept, **missed}
        self._number = round_.number
        self._members = frozenset(member.incarnation for member in round_.members)
        self._gaps = {}
        for member in round_.members:
            for incarnation in member.unreached:
                self._gaps.setdefault(incarnation, set()).add(member.node)
        apart = ((watcher.connection, sorted(self.unreached_by(watcher))) for watcher in self._watchers.values())
        return [(connection, names) for connection, names in apart if names]

    def reached(self, incarnation: str, member: str) -> None:
        """Take note that a member can reach this incarnation by now."""
        self._gaps.get(incarnation, set()).discard(member)

    def unreached_by(self, watcher: Watcher) -> set[str]:
        """Return the members that cannot reach a watcher."""
        return self._gaps.get(watcher.incarnation, set())

    def add(self, node: str, watcher: Watcher) -> None:
        """Take in a watcher, or its newer word; it keeps its place among those that wait."""
        before = self._watchers.get(node)
        if before is not None and (before.beside == watcher.beside or not self._missed.get(node)):
            watcher = replace(watcher, since=before.since)
        self._watchers[node] = watcher

    def remove(self, node: str, connection: Connection | None = None) -> bool:
        """Forget a watcher, or only if this is its connection; return whether it was one."""
        watcher = self._watchers.get(node)
        if watcher is None or (connection is not None and watcher.connection is not connection):
            return False
        del self._watchers[node]
        return True

    def get(self, node: str) -> Watcher | None:
        """Return the watcher of this name."""
        return self._watchers.get(node)

    def names(self) -> Collection[str]:
        """Return the names of all."""
        return self._watchers.keys()

    def connections(self) -> list[Connection]:
        """Return the connections of all."""
        return [watcher.connection for watcher in self._watchers.values()]

    def candidates(self) -> list[Member]:
        """Return what they have said that they are."""
        return [watcher.candidacy for watcher in self._watchers.values() if watcher.candidacy is not None]

    def waiting(self, members: Collection[str], bar: int | None = None) -> dict[str, float]:
        """Return the nodes to make room for, each with the moment since when it waits.

        A node and a member that cannot reach each other have no place in one round that has its minimum.

        Args:
            members: of the round; they may still watch.
            bar: strikes from which on a node would get no place in a round that has its minimum, as a sealed one has.
        """
        now = self._clock()
        return {
            node: watcher.since
            for node, watcher in self._watchers.items()
            if node not in members
            and (bar is None or watcher.strikes < bar)
            and not self.unreached_by(watcher)
            and not watcher.unreached & self._members
            and self._will_come(self._missed.get(node, 0), watcher, now)
        }

    def _will_come(self, missed: int, watcher: Watcher, now: float) -> bool:
        if missed == 0:
            return True
        first, longest = _MISSED_SECONDS
        penalty = 0.0 if missed == 1 else min(longest, first * 2 ** (missed - 2))
        return watcher.beside >= self._number and now - watcher.since >= penalty
