"""From the verdict "it hangs" to the end of the round: all nodes write down their workers' stacks first.

Rank 0's agent decides, and broadcasts that. Every agent collects the stacks of its own workers and reports when it has
them. When all have, or after a few seconds, rank 0's agent ends the round. An agent whose own verdict comes, much
later, although rank 0's has not, does so alone: what hangs may be that agent.
"""

from __future__ import annotations

from azureml_elastic.ipc.agent_messages import Dumped, DumpStacks
from azureml_elastic.node.core.hangs import Hang
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.core.training_actions import (
    AdoptVerdict,
    RecordHang,
    ToLeader,
    ToMembers,
    TrainingAction,
    WriteStacks,
)
from azureml_elastic.node.core.training_events import Hung

__all__ = ["HangResponse"]

_ANSWER_SECONDS = 5.0
"""For all nodes to collect their stacks; twice what one may take."""


class HangResponse:
    """One agent's part in one round.

    Args:
        node: name of the agent's node.

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
        self._missing = set(self._members) if leads else {self._node}
        hang = hung.hang
        actions: list[TrainingAction] = [RecordHang(hang), WriteStacks(hang)]
        if leads:
            actions.append(ToMembers(DumpStacks(self._number, hang.step, hang.waited, hang.limit, hang.phase)))
        return actions

    def received(self, message: DumpStacks) -> list[TrainingAction]:
        """Rank 0's agent has broadcast its verdict."""
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
