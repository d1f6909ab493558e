"""Whether the workers of a round connect to each other within a time limit.

Every rank connects to every other one; where two nodes cannot reach each other, gloo waits without an error. The limit
counts from when the workers of *all* nodes connect, so that the imports of a slow node do not matter. Rank 0's agent
collects that from the nodes and broadcasts it.
"""

from __future__ import annotations

from collections.abc import Iterable

from azureml_elastic.ipc.agent_messages import AllPlaced, Placed
from azureml_elastic.node.core.training_actions import FindPair, ToLeader, ToMembers, TrainingAction

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

    def look(self, now: float, *, placed: bool, connected: bool) -> list[TrainingAction]:
        """Report once that the local workers connect to the others, and look why they have not connected for long.

        Args:
            now: monotonic seconds.
            placed: whether each local worker has a session and an assignment.
            connected: whether a local worker has reported that the ranks have connected.
        """
        actions: list[TrainingAction] = []
        if placed and not self._reported:
            self._reported = True
            actions.append(ToLeader(Placed()))
        if self.until is not None and not connected and now >= self.until:
            actions.append(FindPair())
        return actions

    def reported(self, node: str) -> list[TrainingAction]:
        """Take a node's report, on rank 0's node; all agents get to know the last one."""
        if node not in self._missing:
            return []
        self._missing.remove(node)
        return [] if self._missing else [ToMembers(AllPlaced())]

    def all_placed(self, now: float) -> None:
        """Start the time limit: the workers of all nodes connect to each other from now on."""
        self.until = now + _CONNECT_SECONDS
