"""From the verdict "it hangs" to the end of the round: all nodes write down their workers' stacks first.

Rank 0's agent decides, and broadcasts that. Every agent collects the stacks of its own workers and reports when it has
them. When all have, or after a few seconds, rank 0's agent ends the round. An agent whose own verdict comes, much
later, although rank 0's has not, does so alone: what hangs may be that agent.

**Whether the workers of a round connect to each other within a time limit.** Every rank connects to every other one;
where two nodes cannot reach each other, gloo waits without an error. The limit counts from when the workers of *all*
nodes connect, so that the imports of a slow node do not matter. Rank 0's agent collects that from the nodes and
broadcasts it.
"""

from __future__ import annotations

from collections.abc import Iterable

from azureml_elastic.ipc.agent_messages import AllPlaced, Dumped, DumpStacks, Placed
from azureml_elastic.node.core.hangs import Hang
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.core.training_actions import (
    AdoptVerdict,
    FindPair,
    RecordHang,
    ToLeader,
    ToMembers,
    TrainingAction,
    WriteStacks,
)
from azureml_elastic.node.core.training_events import Hung

__all__ = ["HangResponse", "PeerDiscovery"]

_ANSWER_SECONDS = 5.0
"""For all nodes to collect their stacks; twice what one may take."""


class HangResponse:
    """One agent's part in one round.

    Attributes:
        until: monotonic seconds at which this agent ends the round at the latest, ``None`` where it does not.
    """

    def __init__(self, round_: Round, node: str) -> None:
        self._number = round_.number
        self._members = [member.node for member in round_.members]
        self._node = node
        self._hung: Hung | None = None
        self._known = False
        self._missing: set[str] = set()
        self.until: float | None = None

    def decided(self, hung: Hung, now: float) -> list[TrainingAction]:
        """This agent's detector has given its verdict."""
        if self._known:
            return []
        self._known, self._hung, self.until = True, hung, now + _ANSWER_SECONDS
        leads = self._members[0] == self._node
        # All nodes report to rank 0. Another one that decides knows of its own stacks alone.
        self._missing = set(self._members) if leads else {self._node}
        hang = hung.hang
        actions: list[TrainingAction] = [RecordHang(hang), WriteStacks(hang)]
        if leads:
            actions.append(ToMembers(DumpStacks(self._number, hang.step, hang.waited, hang.limit, hang.phase)))
        return actions

    def received(self, message: DumpStacks) -> list[TrainingAction]:
        """Rank 0's agent has broadcast its verdict."""
        # The broadcast may be a late one, of the round before.
        if self._known or message.round != self._number:
            return []
        self._known = True
        hang = Hang(message.step, message.waited, message.limit, message.phase)
        return [AdoptVerdict(hang), WriteStacks(hang)]

    def written(self) -> list[TrainingAction]:
        """The stacks of this node's workers are written."""
        self._missing.discard(self._node)
        return [] if self._hung is not None else [ToLeader(Dumped())]

    def dumped(self, node: str) -> None:
        """A node has written its stacks; for rank 0's agent."""
        self._missing.discard(node)

    def due(self, now: float) -> Hung | None:
        """Return the verdict for which this agent must end the round now: all stacks that can be had are written."""
        over = not self._missing or (self.until is not None and now >= self.until)
        return self._hung if over else None


# Nothing ends by this limit alone, only by an unreachable pair that probes have found: a slow start is no harm.
_CONNECT_SECONDS = 10.0


class PeerDiscovery:
    """One agent's part in one round.

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
            placed: whether each local worker has a session and an assignment.
            connected: whether a local worker has reported that the ranks have connected.
        """
        actions: list[TrainingAction] = []
        if placed and not self._reported:
            self._reported = True
            actions.append(ToLeader(Placed()))
        if self.until is not None and not connected and now >= self.until:
            # Again at each turn: the probes may find the pair later than this.
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
