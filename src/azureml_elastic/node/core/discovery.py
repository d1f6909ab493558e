"""Whether the workers of a round connect to each other within a time limit.

Every rank connects to every other one; where two nodes cannot reach each other, gloo waits without an error. The limit
counts from when the workers of *all* nodes connect, so that the imports of a slow node do not matter. Rank 0's agent
collects that from the nodes and broadcasts it.
"""

from __future__ import annotations

from collections.abc import Iterable

from azureml_elastic.ipc.agent_messages import AllPlaced

__all__ = ["PeerDiscovery"]

_CONNECT_SECONDS = 10.0


class PeerDiscovery:
    """One agent's part in one round.

    Args:
        nodes: names of the round's nodes.

    Attributes:
        until: monotonic seconds at which the workers should have connected, ``None`` before all can.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self._missing = set(nodes)
        self._reported = False
        self.until: float | None = None

    def must_report(self, *, placed: bool) -> bool:
        """Return, once in a round, whether to report to rank 0's agent that the local workers connect to the others.

        Args:
            placed: whether each local worker has a session and an assignment.
        """
        if self._reported or not placed:
            return False
        self._reported = True
        return True

    def reported(self, node: str) -> AllPlaced | None:
        """Take a node's report, on rank 0's node; return what all agents get after the last one."""
        if node not in self._missing:
            return None
        self._missing.remove(node)
        return None if self._missing else AllPlaced()

    def all_placed(self, now: float) -> None:
        """Start the time limit: the workers of all nodes connect to each other from now on."""
        self.until = now + _CONNECT_SECONDS

    def takes_long(self, now: float, *, connected: bool) -> bool:
        """Return whether the workers should have connected to each other by now.

        Args:
            now: monotonic seconds.
            connected: whether a local worker has reported that they have.
        """
        return self.until is not None and not connected and now >= self.until
