"""What happens in a run, as typed records that nodes and workers append and nobody changes.

Each node writes its own file ``events/<node>.jsonl`` in the run's folder, one event a line, and the rare ones to the
table as well. The ``time`` is the writer's wall clock, for people to read; the order between nodes comes from the
round numbers, never from comparing two clocks.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

__all__ = [
    "CheckpointCommitted",
    "CheckpointQuarantined",
    "Event",
    "HangDetected",
    "HealthChecked",
    "HostQuarantined",
    "HostStruck",
    "NodeLeft",
    "NodeStarted",
    "Progress",
    "Restored",
    "RoundEntered",
    "RoundReopened",
    "RunEnded",
    "Unreachable",
    "WorkerFailed",
    "WorkersStarted",
    "read_event",
]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    """Seconds since the epoch by the writer's clock."""
    node: str
    """The node that wrote this."""
    round: int = 0
    """The round that the node was in, 0 before its first."""

    @property
    def rare(self) -> bool:
        """Whether the event is worth a row in the table."""
        return True


class NodeStarted(_Event):
    """A node's agent runs. ``pid`` is the agent's."""

    kind: Literal["node_started"] = "node_started"
    host: str
    pid: int


class HealthChecked(_Event):
    """The node has checked itself before it asks for a place. In the table only where something was found."""

    kind: Literal["health_checked"] = "health_checked"
    status: Literal["ok", "warn", "fail"]
    """``fail``: the node does not join until its check passes."""
    seconds: float
    """How long the check took."""
    problems: tuple[str, ...] = ()
    """One line for each finding that is not ``ok``."""

    @property
    def rare(self) -> bool:
        """A node that is well is not worth a row."""
        return self.status != "ok"


class HostStruck(_Event):
    """This node holds something against a host."""

    kind: Literal["host_struck"] = "host_struck"
    host: str
    reason: str


class HostQuarantined(_Event):
    """The node's own host has so many live strikes that it trains only where it must."""

    kind: Literal["host_quarantined"] = "host_quarantined"
    host: str
    strikes: int


class Unreachable(_Event):
    """The node cannot reach another one that it needs. Told once for each, and again after some minutes."""

    kind: Literal["unreachable"] = "unreachable"
    host: str
    """The node's own address."""
    peer: str
    """The node that cannot be reached."""
    address: str
    """Of the peer: host and port."""
    purpose: str
    """What the peer is to the node, for example ``rank 0 of round 3``."""
    error: str


class RoundEntered(_Event):
    """The node is a member of a sealed round."""

    kind: Literal["round_entered"] = "round_entered"
    rank: int
    """Rank of the node within the round."""
    members: tuple[str, ...]
    """All nodes of the round in rank order."""
    world_size: int
    """Workers of the round, over all nodes."""


class WorkersStarted(_Event):
    """The node has started its workers. ``pids`` are in local-rank order."""

    kind: Literal["workers_started"] = "workers_started"
    pids: tuple[int, ...]


class Restored(_Event):
    """The session of global rank 0 starts after this many committed steps (0: from scratch)."""

    kind: Literal["restored"] = "restored"
    step: int
    directory: str | None = None


class Progress(_Event):
    """The node's workers have completed this optimizer step. Never in the table."""

    kind: Literal["progress"] = "progress"
    step: int

    @property
    def rare(self) -> bool:
        """Steps are too many for the table."""
        return False


class CheckpointCommitted(_Event):
    """The table now points to this checkpoint."""

    kind: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: int
    directory: str
    seconds: float
    """For how long the training loop was held up."""


class CheckpointQuarantined(_Event):
    """A committed checkpoint was found damaged when it was to be restored; an older one was used."""

    kind: Literal["checkpoint_quarantined"] = "checkpoint_quarantined"
    directory: str
    problems: str


class WorkerFailed(_Event):
    """A worker ended with an error that no loss of another node explains."""

    kind: Literal["worker_failed"] = "worker_failed"
    rank: int
    """Global rank of the worker."""
    exit_code: int
    message: str
    failure_kind: str = ""
    """What ended it, for example ``out_of_memory``; ``docs/failures.md`` lists the kinds."""
    signature: str = ""
    """The same for the same error on any rank, node or process."""
    step: int | None = None
    """The furthest step of the node's workers; ``None`` where they have no session."""


class HangDetected(_Event):
    """Workers that live have completed no step for too long; the round is about to end. Written by who decided it."""

    kind: Literal["hang_detected"] = "hang_detected"
    step: int
    """The last one that a worker of this node has completed in the round, 0 before the first."""
    seconds: float
    """Since then."""
    limit_seconds: float
    phase: str = "step"
    """What the workers were doing: ``start``, ``step`` or ``pause``."""


class RoundReopened(_Event):
    """This node reopened the round: ``round`` has ended and another will follow."""

    kind: Literal["round_reopened"] = "round_reopened"
    reason: str
    lost: tuple[str, ...] = ()
    """Nodes that are gone for good or were preempted."""


class NodeLeft(_Event):
    """The node's agent is about to exit."""

    kind: Literal["node_left"] = "node_left"
    reason: str
    exit_code: int


class RunEnded(_Event):
    """This node closed the run for all."""

    kind: Literal["run_ended"] = "run_ended"
    succeeded: bool
    message: str = ""


Event = Annotated[
    NodeStarted
    | HealthChecked
    | HostStruck
    | HostQuarantined
    | Unreachable
    | RoundEntered
    | WorkersStarted
    | Restored
    | Progress
    | CheckpointCommitted
    | CheckpointQuarantined
    | WorkerFailed
    | HangDetected
    | RoundReopened
    | NodeLeft
    | RunEnded,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def read_event(line: str | bytes) -> Event:
    """Parse one line of an event file.

    Raises:
        ValueError: the line is torn or of an unknown kind.
    """
    return _ADAPTER.validate_json(line)
