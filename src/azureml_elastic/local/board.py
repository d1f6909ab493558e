"""State of a running cluster, computed from its events, for the views and the fault schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    Event,
    HangDetected,
    HealthChecked,
    HostQuarantined,
    NodeLeft,
    NodeStarted,
    Progress,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkerFailed,
    WorkersStarted,
)

__all__ = ["Board", "NodePicture"]


@dataclass(frozen=True)
class NodePicture:
    """State of one node.

    Args:
        name: node name.
        state: short description for people.
        rank: rank in the newest round.
        round: number of the newest round, 0 before the first.
        step: last reported training step.
        alive: whether the agent runs.
    """

    name: str
    state: str = "starting"
    rank: int | None = None
    round: int = 0
    step: int = 0
    alive: bool = True


class Board:
    """Latest state of all nodes and of the run."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodePicture] = {}
        self.round = 0
        self.members: tuple[str, ...] = ()
        self.sizes: list[int] = []
        """World sizes of the sealed rounds so far."""
        self.step = 0
        self.checkpoint_step = 0
        self.ended: RunEnded | None = None
        self.failure: WorkerFailed | None = None

    @property
    def rank0(self) -> str | None:
        """Node that hosts rank 0 in the newest round."""
        return self.members[0] if self.members else None

    def add(self, name: str) -> None:
        """Add a started node."""
        self.nodes[name] = NodePicture(name)

    def set_state(self, name: str, state: str, *, alive: bool = True) -> None:
        """Set the state of a node after an injected fault or its exit."""
        self.nodes[name] = replace(self.nodes[name], state=state, alive=alive)

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events; the events of one node must be in order."""
        for event in events:
            self._apply_to_run(event)
            node = self.nodes.get(event.node, NodePicture(event.node))
            self.nodes[event.node] = _picture(node, event)

    def _apply_to_run(self, event: Event) -> None:
        if isinstance(event, RoundEntered) and event.round > self.round:
            self.round, self.members = event.round, event.members
            self.sizes.append(event.world_size)
        elif isinstance(event, Progress):
            self.step = max(self.step, event.step)
        elif isinstance(event, CheckpointCommitted):
            self.checkpoint_step = max(self.checkpoint_step, event.step)
        elif isinstance(event, WorkerFailed):
            self.failure = event
        elif isinstance(event, RunEnded):
            self.ended = event


def _picture(node: NodePicture, event: Event) -> NodePicture:
    """Return the node after the event; an ended node keeps its state."""
    if isinstance(event, RoundEntered):
        node = replace(node, round=event.round, rank=event.rank)
    elif isinstance(event, Progress):
        node = replace(node, step=event.step)
    state = _state(event)
    return replace(node, state=state) if state is not None and node.alive else node


def _state(event: Event) -> str | None:
    if isinstance(event, NodeStarted):
        return "waiting"
    if isinstance(event, HealthChecked):
        return "unhealthy" if event.status == "fail" else "waiting"
    if isinstance(event, HostQuarantined):
        return "quarantined"
    if isinstance(event, RoundEntered):
        return "joined"
    if isinstance(event, WorkersStarted):
        return "workers started"
    if isinstance(event, Progress):
        return "training"
    if isinstance(event, RoundReopened):
        return "re-forming"
    if isinstance(event, WorkerFailed):
        return "worker failed"
    if isinstance(event, HangDetected):
        return "hung"
    if isinstance(event, NodeLeft):
        return "leaving"
    return None
