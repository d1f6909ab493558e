"""The one picture of a run: what its events say of its rounds, its nodes and its state, folded event by event.

The terminal, the pages, ``status`` and the live views read it; rounds, recoveries and accounting are functions of it.
It is the same however the events are cut into batches and those of different nodes are mixed; those of one node are in
order. Its times are those of the writers; the order of rounds follows from their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    Event,
    HangDetected,
    HealthChecked,
    HostQuarantined,
    NodeLeft,
    NodeReady,
    NodeStarted,
    Progress,
    RanksConnecting,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.plurals import counted

E = TypeVar("E")

_STATES: dict[type[Event], str] = {
    NodeStarted: "starting",
    HealthChecked: "preparing",
    NodeReady: "joining",
    HostQuarantined: "quarantined",
    RoundEntered: "joined",
    WorkersStarted: "workers started",
    Progress: "training",
    RoundReopened: "re-forming",
    WorkerFailed: "worker failed",
    HangDetected: "hung",
    NodeLeft: "leaving",
}


@dataclass(frozen=True)
class NodeTime:
    """Lifetime of a node's process in seconds since the epoch, by the node's clock; of a running one until now."""

    began: float
    ended: float
    running: bool = False

    @property
    def seconds(self) -> float:
        """Wall time of the node."""
        return max(0.0, self.ended - self.began)


@dataclass(frozen=True)
class NodeState:
    """State of one node at a moment.

    Args:
        state: short description for people.
        rank: position of the node in its newest round; ``None`` if it is in none.
        round: number of its newest round, 0 before the first.
        alive: whether the agent runs, as far as is known.
        job: name of its job in Azure ML, empty if unknown.
        reason: why it left, or which nodes it cannot reach, where the run's table is read.
    """

    name: str
    state: str = "starting"
    rank: int | None = None
    round: int = 0
    step: int = 0
    alive: bool = True
    job: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Moment:
    """State of a run at a moment.

    Args:
        round: number of the newest round, which may still be forming.
        state: ``open`` while the round forms, otherwise ``sealed`` or the outcome of the run.
        members: nodes of the newest sealed round in rank order.
        sizes: world sizes of the sealed rounds so far.
        step: last step that is known to be completed, ``None`` before the first.
        steps: number of steps of the whole run, ``None`` if unknown.
        checkpoint_step: step of the last committed checkpoint, ``None`` if there is none.
        reason: why the round before has ended, while the next one forms.
        losses: number of rounds that ended because a node or a worker was lost, as far as they are counted.
        waits: what nodes wait for that have come while a program without a session trains, empty if none waits.
    """

    nodes: tuple[NodeState, ...] = ()
    round: int = 1
    state: Literal["open", "sealed", "succeeded", "failed"] = "open"
    members: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    step: int | None = None
    steps: int | None = None
    checkpoint_step: int | None = None
    reason: str = ""
    message: str = ""
    losses: int = 0
    waits: str = ""

    @property
    def rank0(self) -> str | None:
        """Node that hosts rank 0 in the newest sealed round."""
        return self.members[0] if self.members else None

    @property
    def leading_job(self) -> str | None:
        """Job of rank 0's node, ``None`` while the round forms or if the job is unknown."""
        return next((node.job for node in self.nodes if node.name == self.rank0 and node.job), None)

    @property
    def world_size(self) -> int:
        """World size of the newest sealed round, 0 before the first."""
        return self.sizes[-1] if self.sizes else 0

    @property
    def headline(self) -> str:
        """Round, world size and outcome in one line."""
        if self.state == "open":
            why = f", after: {self.reason}" if self.reason else ""
            return f"Round {self.round} waits for its nodes{why}"
        if self.state == "sealed":
            return f"Round {self.round}: world size {self.world_size} on {counted(len(self.members), 'node')}"
        return f"The run {self.state} in round {self.round}{f': {self.message}' if self.message else ''}"

    @property
    def progress(self) -> str:
        """Step, last checkpoint and losses so far in one line."""
        parts = []
        if self.step is not None:
            parts.append(f"step {self.step}" + (f" of {self.steps}" if self.steps else ""))
        saved = self.checkpoint_step
        parts.append("no checkpoint yet" if saved is None else f"checkpoint of step {saved}")
        if self.losses:
            parts.append(f"losses of nodes or workers: {self.losses}")
        return ", ".join(parts)


class Records:
    """Events by kind, in the order of their times: those of one node in one round, or of all nodes or rounds."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Any], list[Any]] = {}
        self._unsorted: set[type[Any]] = set()
        self.earliest, self.latest = math.inf, -math.inf
        """Times of the first and of the last event."""

    def add(self, event: Event) -> None:
        """Add an event."""
        self.earliest, self.latest = min(self.earliest, event.time), max(self.latest, event.time)
        self._by_kind.setdefault(type(event), []).append(event)
        self._unsorted.add(type(event))

    def all(self, kind: type[E]) -> list[E]:
        """Return the events of a kind; at the same time those of one node in their order."""
        found = self._by_kind.get(kind, [])
        if kind in self._unsorted:
            self._unsorted.remove(kind)
            found.sort(key=lambda event: (event.time, event.node))
        return found

    def has(self, *kinds: type[Event]) -> bool:
        """Return whether there is an event of these kinds."""
        return any(kind in self._by_kind for kind in kinds)

    def first(self, kind: type[E]) -> E | None:
        """Return the first event of a kind, ``None`` without one."""
        return next(iter(self.all(kind)), None)

    def last(self, kind: type[E]) -> E | None:
        """Return the last event of a kind, ``None`` without one."""
        return next(reversed(self.all(kind)), None)

    def times(self, *kinds: type[Event]) -> list[float]:
        """Return the times of the events of these kinds, in order."""
        return sorted(event.time for kind in kinds for event in self._by_kind.get(kind, ()))


class Round(Records):
    """What all nodes have recorded in one round, together and by node; in round 0 before their first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.parts: dict[str, Records] = {}
        self.entry: RoundEntered | None = None
        """Entry of the member with the lowest rank, ``None`` if nobody has entered it; all name the same members."""

    def add(self, event: Event) -> None:
        """Add an event."""
        super().add(event)
        if isinstance(event, RoundEntered):
            self.entry = min(self.entry or event, event, key=lambda entry: (entry.rank, entry.node))

    @property
    def restored(self) -> int | None:
        """Number of completed steps before the round, ``None`` if its workers did not get that far."""
        event = self.last(Restored)
        return None if event is None else event.step

    @property
    def connecting_seconds(self) -> float | None:
        """Time from the entry until workers without a session began to connect to each other, ``None`` if unknown."""
        return min(self.since_entry(RanksConnecting), default=None)

    @property
    def steps(self) -> list[int]:
        """Reported steps, in no order."""
        return [event.step for event in self.all(Progress)]

    @property
    def failed(self) -> bool:
        """Whether a failed or hanging worker has ended it."""
        return self.has(WorkerFailed, HangDetected)

    def times_by_node(self, *kinds: type[Event]) -> dict[str, list[float]]:
        """Return for each node the times of its events of these kinds."""
        found = ((node, part.times(*kinds)) for node, part in self.parts.items())
        return {node: times for node, times in found if times}

    def since_entry(self, *kinds: type[Event]) -> list[float]:
        """Return the times of the events of these kinds, each since the entry of the node that wrote it."""
        entered = self.times_by_node(RoundEntered)
        found = self.times_by_node(*kinds).items()
        return [max(0.0, time - entered[node][-1]) for node, times in found if node in entered for time in times]


class Node(Records):
    """What one node has recorded, in all rounds and by round."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, Records] = {}

    @property
    def time(self) -> NodeTime:
        """Lifetime as far as the node has recorded it: up to the last event of a killed one."""
        begun = (event.began for event in self.all(NodeStarted) if event.began is not None)
        return NodeTime(min([self.earliest, *begun]), self.latest)


class Picture(Records):
    """All that is known of a run by its events, by round and by node; ``nodes`` are those that have recorded any."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[int, Round] = {}
        self.nodes: dict[str, Node] = {}
        self._states: dict[str, NodeState] = {}
        self._observed: set[str] = set()
        self._step: int | None = None
        self._checkpoint: int | None = None
        self._now: Moment | None = Moment()

    @classmethod
    def of(cls, events: Iterable[Event]) -> Picture:
        """Return the picture after these events."""
        picture = cls()
        picture.apply(events)
        return picture

    def apply(self, events: Iterable[Event]) -> None:
        """Continue with these events."""
        for event in events:
            number, name = event.round, event.node
            node = self.nodes.get(name) or self.nodes.setdefault(name, Node())
            round_ = self.rounds.get(number) or self.rounds.setdefault(number, Round(number))
            if number not in node.parts:
                node.parts[number] = round_.parts[name] = Records()
            for records in (self, round_, node, node.parts[number]):
                records.add(event)
            self._states[name] = _state_after(self._states.get(name, NodeState(name)), event)
            self._observed.discard(name)
            # The greatest so far, as a view asks for them at each look.
            if isinstance(event, Progress):
                self._step = max(event.step, self._step or 0)
            elif isinstance(event, CheckpointCommitted):
                self._checkpoint = max(event.step, self._checkpoint or 0)
            self._now = None

    def expect(self, name: str, state: str = "starting") -> None:
        """Set the state of a node that has yet to record its first event."""
        if name not in self.nodes:
            self._states[name], self._now = NodeState(name, state), None

    def observe(self, name: str, state: str, *, alive: bool = True) -> None:
        """Set the state of a node after an injected fault, until its next event, or after its exit."""
        self._states[name] = replace(self._states[name], state=state, alive=alive)
        self._observed.add(name)
        self._now = None

    @property
    def sealed(self) -> list[Round]:
        """Rounds that nodes have entered, in order."""
        return [self.rounds[number] for number in sorted(self.rounds) if self.rounds[number].entry is not None]

    @property
    def restored(self) -> dict[int, int]:
        """For each round that trained the number of completed steps before it."""
        found = {number: round_.restored for number, round_ in self.rounds.items()}
        return {number: step for number, step in found.items() if step is not None}

    @property
    def ended(self) -> RunEnded | None:
        """The end of the run, ``None`` if no node has recorded it."""
        return max(self.all(RunEnded), key=lambda event: event.round, default=None)

    @property
    def now(self) -> Moment:
        """State of the run after the events so far."""
        if self._now is None:
            self._now = self._moment()
        return self._now

    def _moment(self) -> Moment:
        entries = [round_.entry for round_ in self.sealed]
        newest = entries[-1] if entries else None
        found = Moment(
            nodes=tuple(map(self._state_now, self._states.values())),
            members=() if newest is None else newest.members,
            sizes=tuple(entry.world_size for entry in entries if entry is not None),
            step=self._step,
            checkpoint_step=self._checkpoint,
        )
        ended = self.ended
        if ended is not None:
            state: Literal["succeeded", "failed"] = "succeeded" if ended.succeeded else "failed"
            return replace(found, round=ended.round, state=state, message=ended.message)
        if newest is None:
            return found
        reopened = self.rounds[newest.round].first(RoundReopened)
        if reopened is not None:
            return replace(found, round=newest.round + 1, reason=reopened.reason)
        return replace(found, round=newest.round, state="sealed")

    def _state_now(self, state: NodeState) -> NodeState:
        """Return the state of a node: one that was lost has not written that it left."""
        reopened = self.rounds[state.round].first(RoundReopened) if state.round else None
        lost = reopened is not None and state.name in reopened.lost
        lost = lost and state.alive and state.name not in self._observed
        return replace(state, state="lost") if lost and not self.nodes[state.name].has(NodeLeft) else state


def _state_after(state: NodeState, event: Event) -> NodeState:
    changes: dict[str, Any] = {}
    if isinstance(event, NodeStarted):
        changes["job"] = event.job
    elif isinstance(event, RoundEntered):
        changes |= {"round": event.round, "rank": event.rank}
    elif isinstance(event, Progress):
        changes["step"] = event.step
    unhealthy = isinstance(event, HealthChecked) and event.status == "fail"
    text = "unhealthy" if unhealthy else _STATES.get(type(event))
    if text is not None and state.alive:
        changes["state"] = text
    return replace(state, **changes) if changes else state
