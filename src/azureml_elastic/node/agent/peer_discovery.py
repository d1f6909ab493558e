"""Whether the workers of a round connect to each other within a time limit.

Every rank connects to every other one; where two nodes cannot reach each other, gloo waits without an error. The limit
counts from when the workers of *all* nodes connect, so that the imports of a slow node do not matter. Rank 0's agent
collects that from the nodes and broadcasts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from azureml_elastic.ipc.agent_messages import AllPlaced

__all__ = ["PeerDiscovery"]

_CONNECT_SECONDS = 10.0


class PeerDiscovery:
    """One agent's part. For the agent's thread.

    Args:
        broadcast: function that sends to all agents of the round; used by rank 0's agent.
        clock: returns monotonic seconds.
    """

    def __init__(self, broadcast: Callable[[AllPlaced], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._broadcast = broadcast
        self._clock = clock
        self.begin(())

    def begin(self, nodes: Iterable[str]) -> None:
        """A round of these nodes begins."""
        self._missing = set(nodes)
        self._reported = False
        self._since: float | None = None

    def must_report(self, *, placed: bool) -> bool:
        """Return, once in a round, whether to report to rank 0's agent that the local workers connect to the others.

        Args:
            placed: whether each local worker has a session and an assignment.
        """
        if self._reported or not placed:
            return False
        self._reported = True
        return True

    def reported(self, node: str) -> None:
        """Record a node's report; after the last one, broadcast to all agents."""
        if node in self._missing:
            self._missing.remove(node)
            if not self._missing:
                self._broadcast(AllPlaced())

    def all_placed(self) -> None:
        """Start the time limit: the workers of all nodes connect to each other from now on."""
        self._since = self._clock()

    def takes_long(self, *, connected: bool) -> bool:
        """Return whether the workers should have connected to each other by now.

        Args:
            connected: whether a local worker has reported that they have.
        """
        return self._since is not None and not connected and self._clock() - self._since >= _CONNECT_SECONDS
