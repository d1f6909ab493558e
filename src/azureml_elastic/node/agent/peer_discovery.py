"""Whether the workers of a round find each other, or have been looking for each other for too long.

Sessions connect every rank with every other one. Where two nodes cannot reach each other that does not end, nor does
gloo say so. From when the workers of *all* nodes look, which rank 0's agent learns and tells, seconds are enough: how
long single nodes import before says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["PeerDiscovery"]

_CONNECT_SECONDS = 10.0


class PeerDiscovery:
    """One agent's part. For the agent's thread.

    Args:
        broadcast: sends to all agents of the round; for rank 0's.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, broadcast: Callable[[Mapping[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._broadcast = broadcast
        self._clock = clock
        self.begin(())

    def begin(self, nodes: Iterable[str]) -> None:
        """A round of these nodes begins."""
        self._missing = set(nodes)
        self._said = False
        self._since: float | None = None

    def news(self, *, placed: bool) -> dict[str, Any] | None:
        """Return, once, the report for rank 0's agent that all local workers look for the others.

        Args:
            placed: whether each has a session that knows its place.
        """
        if self._said or not placed:
            return None
        self._said = True
        return {"op": "report", "what": "placed"}

    def reported(self, node: str) -> None:
        """Take in such a report; after the last one, all agents are notified."""
        if node in self._missing:
            self._missing.remove(node)
            if not self._missing:
                self._broadcast({"op": "placed"})

    def all_placed(self) -> None:
        """The workers of all nodes look for each other from now on."""
        self._since = self._clock()

    def takes_long(self, *, connected: bool) -> bool:
        """Tell whether they should have found each other.

        Args:
            connected: whether a local worker has.
        """
        return self._since is not None and not connected and self._clock() - self._since >= _CONNECT_SECONDS
