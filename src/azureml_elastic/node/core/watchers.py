"""The waiting nodes that are connected to a hub, and those of them for which the running round should make room."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from azureml_elastic.node.core.round import Member, Round

_BACKOFF_SECONDS = (15.0, 240.0)
"""First and longest wait of a node that has missed two or more seals; it doubles each time."""


@dataclass(frozen=True)
class Watcher:
    """A waiting node.

    Args:
        since: monotonic seconds at which it has sent its state.
        beside: number of the sealed round beside which it waits, 0 for none.
        candidacy: the row with which it wants to be in an open round.
        strikes: number of strikes against its machine.
        unreached: incarnations of the nodes that it cannot reach.
    """

    link: int
    since: float
    beside: int = 0
    candidacy: Member | None = None
    strikes: int = 0
    incarnation: str = ""
    unreached: frozenset[str] = frozenset()


class Watchers:
    """The waiting nodes of one hub, by name.

    To make room, a round interrupts its workers, which must not happen repeatedly for a node that then does not join.
    An open connection does not show that a node will join, since a thread keeps it alive even if the main thread
    hangs. A node that was expected in a round and missed the seal therefore counts again only when it sends that it
    waits beside that round, which its main thread does. If it misses a second seal, it waits longer each time.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Watcher] = {}
        self._missed_seals: dict[str, int] = {}
        self._number = 0
        self._members: frozenset[str] = frozenset()
        self._unreached_by: dict[str, set[str]] = {}

    def enter(self, round_: Round) -> list[tuple[int, tuple[str, ...]]]:
        """Count the nodes that were expected in this sealed round but are not in it, and record unreachable pairs.

        Returns:
            The connections of waiting nodes that members cannot reach, each with the names of these members. The nodes
            may have connected before this hub's node had the round.
        """
        members = {member.node for member in round_.members}
        outside = [node for node in round_.expected if node not in members]
        if len(outside) < round_.nodes_per_replica > 1:
            outside = []  # they may be what whole replicas have left over, and are no slower than others
        missed = {node: self._missed_seals.get(node, 0) + 1 for node in outside}
        kept = {node: count for node, count in self._missed_seals.items() if node not in members}
        self._missed_seals = {**kept, **missed}
        self._number = round_.number
        self._members = frozenset(member.incarnation for member in round_.members)
        self._unreached_by = {}
        for member in round_.members:
            for incarnation in member.unreached:
                self._unreached_by.setdefault(incarnation, set()).add(member.node)
        found = ((watcher.link, self.unreached_by(watcher)) for watcher in self.nodes.values())
        return [(link, names) for link, names in found if names]

    def reached(self, incarnation: str, member: str) -> None:
        """Record that a member can reach this incarnation again."""
        self._unreached_by.get(incarnation, set()).discard(member)

    def unreached_by(self, watcher: Watcher) -> tuple[str, ...]:
        """Return the names of the members that cannot reach a waiting node."""
        return tuple(sorted(self._unreached_by.get(watcher.incarnation, ())))

    def add(self, node: str, watcher: Watcher) -> None:
        """Add a waiting node or its new state; its waiting time goes on unless it waits beside a round it missed."""
        before = self.nodes.get(node)
        if before is not None and (before.beside == watcher.beside or not self._missed_seals.get(node)):
            watcher = replace(watcher, since=before.since)
        self.nodes[node] = watcher

    def remove(self, node: str, link: int | None = None) -> bool:
        """Remove a waiting node, if it has this connection or none is given; return whether it was removed."""
        watcher = self.nodes.get(node)
        if watcher is None or (link is not None and watcher.link != link):
            return False
        del self.nodes[node]
        return True

    def waiting_members(self) -> set[str]:
        """Return the names of the nodes that are members of the round, and have not received that yet."""
        return {node for node, watcher in self.nodes.items() if watcher.incarnation in self._members}

    def candidates(self) -> list[Member]:
        """Return the rows with which waiting nodes want to be in an open round."""
        return [watcher.candidacy for watcher in self.nodes.values() if watcher.candidacy is not None]

    def waiting(self, members: Collection[str], now: float, quarantine: int | None = None) -> dict[str, float]:
        """Return the nodes to make room for, each with the moment since which it waits.

        Nodes and members that cannot reach each other are never in one round that has its minimum.

        Args:
            members: names of the members that are not lost, which may still be connected as waiting nodes.
            quarantine: number of strikes from which a node is not in a round that has its minimum.
        """
        return {
            node: watcher.since
            for node, watcher in self.nodes.items()
            if node not in members
            and (quarantine is None or watcher.strikes < quarantine)
            and not self.unreached_by(watcher)
            and not watcher.unreached & self._members
            and self._will_join(self._missed_seals.get(node, 0), watcher, now)
        }

    def _will_join(self, missed: int, watcher: Watcher, now: float) -> bool:
        if missed == 0:
            return True
        first, longest = _BACKOFF_SECONDS
        backoff = 0.0 if missed == 1 else min(longest, first * 2 ** (missed - 2))
        return watcher.beside >= self._number and now - watcher.since >= backoff
