"""Typed, append-only events of a run.

Each node writes its own file ``events/<node>.jsonl`` in the run folder, one event per line, and rare events also to the
table. ``time`` is the writer's wall clock; the order between nodes follows from the round numbers, never from comparing
two clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Event(BaseModel):
    # Built when first used: an agent writes few kinds, and reads none before it has announced its node.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    time: float
    """Seconds since the epoch by the writer's clock."""
    node: str
    """Node that wrote the event."""
    round: int = 0
    """Round of the node, 0 before its first."""

    @property
    def rare(self) -> bool:
        """Whether the event is also written to the table: all but steps, metrics and passed health checks."""
        if isinstance(self, Progress):
            return self.last
        if isinstance(self, Metrics):
            return False
        return not (isinstance(self, HealthChecked) and self.status == "ok")


class NodeStarted(_Event):
    """A node's agent has started; ``pid`` is the agent's."""

    kind: Literal["node_started"] = "node_started"
    host: str
    pid: int
    job: str = ""
    """Name of the node's job in Azure ML, empty elsewhere."""
    began: float | None = None
    """Start of the agent's process in seconds since the epoch."""


class NodeReady(_Event):
    """The node has made its preparations, such as imports, and waits for its first round."""

    kind: Literal["node_ready"] = "node_ready"


class HealthChecked(_Event):
    """The node has checked its health before joining."""

    kind: Literal["health_checked"] = "health_checked"
    status: Literal["ok", "warn", "fail"]
    """Result; with ``fail`` the node does not join until its check passes."""
    seconds: float
    """Duration of the check."""
    problems: tuple[str, ...] = ()
    """One line per finding that is not ``ok``."""


class HostStruck(_Event):
    """The node has recorded a strike against a host."""

    kind: Literal["host_struck"] = "host_struck"
    host: str
    reason: str


class HostQuarantined(_Event):
    """The node's host has so many live strikes that it becomes a member only if the minimum requires it."""

    kind: Literal["host_quarantined"] = "host_quarantined"
    host: str
    strikes: int


class Unreachable(_Event):
    """The node cannot reach another node; reported once per pair, and again after some minutes."""

    kind: Literal["unreachable"] = "unreachable"
    host: str
    """Address of the node."""
    peer: str
    """Node that cannot be reached."""
    address: str
    """Host and port of the peer."""
    purpose: str
    """Role of the peer, for example ``rank 0 of round 3``."""
    error: str


class RoundEntered(_Event):
    """The node has become a member of a sealed round."""

    kind: Literal["round_entered"] = "round_entered"
    rank: int
    """Rank of the node within the round."""
    members: tuple[str, ...]
    """Nodes of the round in rank order."""
    world_size: int
    """Number of workers on all nodes."""


class WorkersStarted(_Event):
    """The node has started its workers; ``pids`` are in local-rank order."""

    kind: Literal["workers_started"] = "workers_started"
    pids: tuple[int, ...]


class RanksConnecting(_Event):
    """Workers without a session have begun to connect to each other; written by rank 0's node."""

    kind: Literal["ranks_connecting"] = "ranks_connecting"


class TrainsWithoutSession(_Event):
    """Workers have had the time to open a session, and have opened none; written once by each node of rank 0."""

    kind: Literal["trains_without_session"] = "trains_without_session"


class StateSaved(_Event):
    """Last save of a round by a script without a session; the time is when it began."""

    kind: Literal["state_saved"] = "state_saved"


class Restored(_Event):
    """Training starts after this many completed steps (0: from scratch); written by rank 0's node."""

    kind: Literal["restored"] = "restored"
    step: int
    directory: str | None = None


class Progress(_Event):
    """The node's workers have completed this optimizer step."""

    kind: Literal["progress"] = "progress"
    step: int
    last: bool = False
    """Whether it is the node's last step of the round, which the table has, too; its time is that of the step."""
    samples: int | None = None
    """Samples that all nodes have trained in the round up to this step; ``None`` if they are not counted."""


class Metrics(_Event):
    """Values that the training loop has logged for this step; written by rank 0's node.

    A step that is trained again after a loss may be logged again: the values of the highest round count.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    kind: Literal["metrics"] = "metrics"
    step: int
    values: dict[str, float]
    """Values by name, for example ``loss`` or ``learning_rate``; NaN and infinity are written as strings."""


class CheckpointCommitted(_Event):
    """The table now points to this checkpoint."""

    kind: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: int
    directory: str
    seconds: float
    """Duration of the training pause."""


class CheckpointQuarantined(_Event):
    """A committed checkpoint was found damaged during the restore, and an older one was used."""

    kind: Literal["checkpoint_quarantined"] = "checkpoint_quarantined"
    directory: str
    problems: str


class WorkerFailed(_Event):
    """A worker, or the process of its node that serves the round's store, has failed, and no lost node explains it."""

    kind: Literal["worker_failed"] = "worker_failed"
    rank: int
    """Global rank of the worker; of the store's node, that of its first one."""
    exit_code: int
    message: str
    failure_kind: str = ""
    """Kind of failure, for example ``out_of_memory``; see ``docs/explanation/failures.md``."""
    signature: str = ""
    """Signature that is equal for the same error on any rank, node or process."""
    step: int | None = None
    """Furthest step of the node's workers; ``None`` without a session."""

    @property
    def process(self) -> str:
        """What has failed, in words."""
        return "the process of the round's store" if self.failure_kind == "store" else f"worker {self.rank}"


class HangDetected(_Event):
    """Living workers have completed no step for too long; written by the node that ends the round."""

    kind: Literal["hang_detected"] = "hang_detected"
    step: int
    """Last step that a worker of this node has completed in the round, 0 before the first."""
    seconds: float
    """Time since that step."""
    limit_seconds: float
    phase: str = "step"
    """Phase of the workers: ``start``, ``step`` or ``pause``."""


class RoundReopened(_Event):
    """The node has reopened the round, so that another one follows."""

    kind: Literal["round_reopened"] = "round_reopened"
    reason: str
    lost: tuple[str, ...] = ()
    """Nodes that were lost or preempted."""


class NodeLeft(_Event):
    """The node's agent is about to exit."""

    kind: Literal["node_left"] = "node_left"
    reason: str
    exit_code: int


class RunEnded(_Event):
    """The node has closed the run."""

    kind: Literal["run_ended"] = "run_ended"
    succeeded: bool
    message: str = ""


Event = Annotated[
    NodeStarted
    | NodeReady
    | HealthChecked
    | HostStruck
    | HostQuarantined
    | Unreachable
    | RoundEntered
    | WorkersStarted
    | RanksConnecting
    | TrainsWithoutSession
    | StateSaved
    | Restored
    | Progress
    | Metrics
    | CheckpointCommitted
    | CheckpointQuarantined
    | WorkerFailed
    | HangDetected
    | RoundReopened
    | NodeLeft
    | RunEnded,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event, config=ConfigDict(defer_build=True))


def read_event(line: str | bytes) -> Event:
    """Parse one line of an event file.

    Raises:
        ValueError: the line is torn or of an unknown kind.
    """
    return _ADAPTER.validate_json(line)


def read_event_value(value: Mapping[str, Any]) -> Event:
    """Parse the value of an event's row.

    Raises:
        ValueError: the event is of an unknown kind or incomplete.
    """
    return _ADAPTER.validate_python(dict(value))
