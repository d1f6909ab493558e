"""What is published of a run: events of the ledger as metrics, tags and spans; and the interface of a publisher.

Only the node of rank 0 publishes, and it knows its own events alone. Tags from before it became that of rank 0 are
published then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from azureml_elastic.ledger import accounting
from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    CheckpointQuarantined,
    Event,
    HangDetected,
    HostQuarantined,
    Metrics,
    NodeLeft,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.metric_names import OWN_PREFIX
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.sentences import describe, headline
from azureml_elastic.plurals import counted


@dataclass(frozen=True)
class Value:
    """Value of a metric at a step.

    Args:
        time: seconds since the epoch.
    """

    name: str
    step: int
    value: float
    time: float


@dataclass(frozen=True)
class Span:
    """A part of the run with a beginning and an end.

    Args:
        ended: seconds since the epoch; ``None`` for a round that has just begun and is published again at its end.
    """

    name: Literal["round", "save", "restore"]
    started: float
    ended: float | None
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What an event adds to the published state of a run.

    Args:
        tags: texts by name, which replace earlier ones.
        spans: spans that have ended, or rounds that have begun.
        took_over: whether this node has become that of rank 0, so that another one may have published meanwhile.
        resumed: step after which training begins, as later steps are trained again; ``None`` without a change.
        ended: whether the run has succeeded; ``None`` while it goes on.
    """

    values: tuple[Value, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    took_over: bool = False
    resumed: int | None = None
    ended: bool | None = None

    def __bool__(self) -> bool:
        """Return whether there is anything to publish."""
        return self != _NOTHING


_NOTHING = Update()


class Publisher(Protocol):
    """A destination. Its methods are called from one thread, and may wait."""

    def publish(self, updates: Sequence[Update]) -> None:
        """Publish updates in their order.

        An error other than ``MissingExtra`` may be temporary: the same updates are published again later, with more.
        """

    def close(self) -> None:
        """Publish what is buffered, and release all resources."""


NUMBERED_TAGS = 8
"""Number of the first rounds that have tags of their own; later ones share a tag. Azure ML takes 50 tags of a run."""

LONGEST_TAG = 400
"""Largest number of characters of a tag's text."""

_MOST_NODES = 8


class Translation:
    """Translates the events of one node, in their order.

    The run's own metrics belong to the steps that the node reports, which become fewer the longer it runs:

    - ``elastic/world_size``: number of workers of the round
    - ``elastic/step_seconds``: mean duration of a step since the last value in the same round
    - ``elastic/goodput``: share of the time since this node has started that was training which was kept
    - ``elastic/restarts``: number of rounds before this one
    - ``elastic/checkpoint_pause_seconds``: time for which a checkpoint has paused the training
    """

    def __init__(self) -> None:
        self._picture = Picture()
        self._leads = False
        self._entered: RoundEntered | None = None
        self._led: RoundEntered | None = None
        self._starting: float | None = None
        self._reported: tuple[int, float] | None = None
        self._resumed = -1
        self._tags: dict[str, str] = {}

    def add(self, event: Event) -> Update:
        """Return what an event adds; nothing as long as this node is not that of rank 0."""
        # Logged values are by far the most events, and nothing that is computed here needs them.
        if not isinstance(event, Metrics):
            self._picture.apply([event])
        tags = self._tags_of(event)
        self._tags.update({name: _shorten(text) for name, text in tags.items()})
        spans = self._round_spans(event)
        took_over = False
        if isinstance(event, RoundEntered):
            took_over = event.rank == 0 and not self._leads
            self._leads = event.rank == 0
            self._entered, self._starting, self._reported, self._resumed = event, event.time, None, -1
        update = replace(self._update(event), took_over=took_over)
        if not self._leads:
            return Update(spans=spans)  # the end of a round that this node has led
        tags, self._tags = self._tags, {}
        return replace(update, spans=(*spans, *update.spans), tags=tags)

    def _update(self, event: Event) -> Update:
        match event:
            case WorkersStarted():
                self._starting = event.time
            case Restored():
                self._reported, self._resumed = None, event.step
                attributes: dict[str, str | int] = {"step": event.step, "directory": event.directory or ""}
                began = event.time if self._starting is None else self._starting
                own = self._own(event, event.step, {"world_size": self._size, "restarts": event.round - 1})
                return Update(own, spans=(self._span("restore", began, event, attributes),), resumed=event.step)
            case Metrics():
                logged = tuple(Value(name, event.step, value, event.time) for name, value in event.values.items())
                return Update(logged + self._report(event, event.step))
            case Progress():
                return Update(self._report(event, event.step))
            case CheckpointCommitted():
                attributes = {"step": event.step, "directory": event.directory}
                return Update(
                    self._own(event, event.step, {"checkpoint_pause_seconds": event.seconds}),
                    spans=(self._span("save", event.time - event.seconds, event, attributes),),
                )
            case RunEnded():
                return Update(ended=event.succeeded)
            case NodeLeft() if not event.reason.startswith("preempted"):
                return Update(ended=event.exit_code == 0)
        return Update()

    @property
    def _size(self) -> int:
        return 0 if self._entered is None else self._entered.world_size

    def _report(self, event: Metrics | Progress, step: int) -> tuple[Value, ...]:
        """Return the run's own metrics for a completed step, unless they were returned for it."""
        if step <= (self._resumed if self._reported is None else self._reported[0]):
            return ()
        own: dict[str, float] = {"world_size": self._size, "restarts": event.round - 1}
        if self._reported is not None:
            before, at = self._reported
            own["step_seconds"] = max(0.0, event.time - at) / (step - before)
        if (share := self._goodput(event)) is not None:
            own["goodput"] = share
        self._reported = step, event.time
        return self._own(event, step, own)

    def _goodput(self, event: Event) -> float | None:
        node = self._picture.nodes.get(event.node)
        if node is None:
            return None
        # Of all events again, as the report computes it: a second way of counting would disagree with it. Events are
        # few, see EventRate.
        time = replace(node.time, ended=max(node.time.ended, event.time), running=True)
        return accounting.goodput(accounting.totals(accounting.account(self._picture, {event.node: time})))

    @staticmethod
    def _own(event: Event, step: int, values: dict[str, float]) -> tuple[Value, ...]:
        return tuple(Value(OWN_PREFIX + name, step, float(value), event.time) for name, value in values.items())

    @staticmethod
    def _span(
        name: Literal["save", "restore"], started: float, event: Event, attributes: Mapping[str, str | int]
    ) -> Span:
        return Span(name, min(started, event.time), event.time, {"round": event.round, **attributes})

    def _round_spans(self, event: Event) -> tuple[Span, ...]:
        """Return the span of the round that an event ends, if this node leads it, and that of one that begins."""
        spans: list[Span] = []
        if self._led is not None and isinstance(event, RoundEntered | RoundReopened | RunEnded | NodeLeft):
            spans.append(Span("round", self._led.time, event.time, _round_attributes(self._led)))
            self._led = None
        if isinstance(event, RoundEntered) and event.rank == 0:
            self._led = event
            spans.append(Span("round", event.time, None, _round_attributes(event)))
        return tuple(spans)

    def _tags_of(self, event: Event) -> dict[str, str]:
        match event:
            case RoundEntered():
                return {f"elastic.round.{_slot(event.round)}": _members_text(event)}
            case RoundReopened():
                return {f"elastic.round_end.{_slot(event.round)}": describe(event) or ""}
            case WorkerFailed() | HangDetected():
                return {f"elastic.failure.{_slot(event.round)}": f"round {event.round}: {describe(event)}"}
            case HostQuarantined():
                return {"elastic.quarantined.host": describe(event) or ""}
            case CheckpointQuarantined():
                return {"elastic.quarantined.checkpoint": describe(event) or ""}
            case RunEnded():
                return {"elastic.end": "succeeded" if event.succeeded else f"failed: {headline(event.message)}"}
            case NodeLeft() if self._picture.ended is None:
                return {"elastic.end": f"the node of rank 0 has left ({event.exit_code}): {headline(event.reason)}"}
        return {}


def _slot(number: int) -> str:
    return str(number) if number <= NUMBERED_TAGS else "latest"


def _round_attributes(entered: RoundEntered) -> dict[str, str | int | float]:
    return {"round": entered.round, "world_size": entered.world_size, "nodes": len(entered.members)}


def _members_text(entered: RoundEntered) -> str:
    shown = ", ".join(entered.members[:_MOST_NODES])
    workers, nodes = counted(entered.world_size, "worker"), counted(len(entered.members), "node")
    more = f" and {len(entered.members) - _MOST_NODES} more" if len(entered.members) > _MOST_NODES else ""
    return f"round {entered.round}: sealed {workers} on {nodes}: {shown}{more}"


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TAG else f"{text[: LONGEST_TAG - 3]}..."
