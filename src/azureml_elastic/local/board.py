"""State of a running cluster, computed from its events, for the views and the fault schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    Event,
    HangDetected,
    HealthChecked,
    HostQuarantined,
    NodeLeft,
    NodeStarted,
    Progress,
    Restored,
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


@dataclass
class Board:
    """Latest state of all nodes and of the run."""

    nodes: dict[str, NodePicture] = field(default_factory=dict)
    round: int = 0
    members: tuple[str, ...] = ()
    sizes: list[int] = field(default_factory=list)
    """World sizes of the sealed rounds so far."""
    workers_started: bool = False
    """Whether workers were started."""
    training: bool = False
    """Whether a session has reported a step: one that it begins with, or one that it has completed."""
    step: int = 0
    checkpoint_step: int = 0
    ended: RunEnded | None = None
    failure: WorkerFailed | None = None

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
        elif isinstance(event, WorkersStarted):
            self.workers_started = True
        elif isinstance(event, Restored):
            self.training = True
        elif isinstance(event, Progress):
            self.training = True
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
    unhealthy = isinstance(event, HealthChecked) and event.status == "fail"
    state = "unhealthy" if unhealthy else _STATES.get(type(event))
    return replace(node, state=state) if state is not None and node.alive else node


_STATES: dict[type[Event], str] = {
    NodeStarted: "waiting",
    HealthChecked: "waiting",
    HostQuarantined: "quarantined",
    RoundEntered: "joined",
    WorkersStarted: "workers started",
    Progress: "training",
    RoundReopened: "re-forming",
    WorkerFailed: "worker failed",
    HangDetected: "hung",
    NodeLeft: "leaving",
}
