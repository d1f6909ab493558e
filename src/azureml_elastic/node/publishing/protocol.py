"""What is published of a run, and the interface of a publisher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = ["Publisher", "Span", "Update", "Value"]


@dataclass(frozen=True)
class Value:
    """Value of a metric at a step.

    Args:
        name: name of the metric.
        step: step that the value belongs to.
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
        name: kind of the span.
        started: seconds since the epoch.
        ended: seconds since the epoch; ``None`` for a round that has just begun and is published again at its end.
        attributes: further values by name.
    """

    name: Literal["round", "save", "restore"]
    started: float
    ended: float | None
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What an event adds to the published state of a run.

    Args:
        values: values of metrics.
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
