"""What each node of a run was doing, with marks for faults and checkpoints, reduced to what a page can show.

Pure functions. Spans that are too short to be seen are merged with their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.ledger.accounting import Activity, Cause, Span
from azureml_elastic.ledger.events import CheckpointCommitted, Event, HangDetected, RoundReopened, WorkerFailed
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.sentences import describe
from azureml_elastic.ledger.summary import Report
from azureml_elastic.report.cells import activity_text, ending_text

MOST_NODES = 60
"""Most nodes that have a timeline."""

_MOST_SEGMENTS = 2400
"""About the most segments of all timelines."""

_MOST_MARKS = 1500
_CLOSEST = 0.006
"""Least distance of two marks of a kind, as a share of the run."""

_LONGEST_NAME = 15
_FINEST = 1 / 800
"""Shortest visible segment, as a share of the run."""

_Key = tuple[Activity, "Cause | None"]
MarkKind = Literal["checkpoint", "fault", "loss", "failure", "added"]
_MARKED: dict[type[Event], MarkKind] = {
    CheckpointCommitted: "checkpoint",
    WorkerFailed: "failure",
    HangDetected: "failure",
}


@dataclass(frozen=True)
class Segment:
    """A visible part of a node's timeline.

    Args:
        started: seconds since the epoch.
        ended: seconds since the epoch.
        rounds: first and last round.
        others: other activities with their seconds.
    """

    activity: Activity
    cause: Cause | None
    started: float
    ended: float
    rounds: tuple[int, int]
    others: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Mark:
    """An event on a node's timeline.

    Args:
        kind: kind of event; a fault is one that was injected.
        time: seconds since the epoch.
    """

    kind: MarkKind
    time: float
    text: str


@dataclass(frozen=True)
class NodeTimeline:
    """Timeline of one node.

    Args:
        ending: end of the node, such as ``killed``; empty if it is unknown.
    """

    node: str
    ending: str
    segments: tuple[Segment, ...]
    marks: tuple[Mark, ...]

    @property
    def label(self) -> str:
        """Name as far as there is room for it."""
        return self.node if len(self.node) <= _LONGEST_NAME else f"{self.node[:6]}…{self.node[-(_LONGEST_NAME - 7) :]}"


def node_timelines(report: Report, spans: Sequence[Span], picture: Picture) -> list[NodeTimeline]:
    """Return the timelines of the first nodes, in the order in which they started."""
    if not spans:
        return []
    by_node: dict[str, list[Span]] = {}
    for span in spans:
        by_node.setdefault(span.node, []).append(span)
    names = sorted(by_node, key=lambda name: by_node[name][0].started)[:MOST_NODES]
    duration = max(span.ended for span in spans) - min(span.started for span in spans)
    shortest = duration * max(_FINEST, len(names) / _MOST_SEGMENTS)
    endings = {node.name: ending_text(node.ending, node.exit_code) for node in report.nodes}
    found = _marks(report, picture)
    marks = _thinned({name: found.get(name, []) for name in names}, duration * _CLOSEST)
    return [
        NodeTimeline(name, endings.get(name, ""), tuple(_merged(by_node[name], shortest)), tuple(marks[name]))
        for name in names
    ]


@dataclass
class _Part:
    """Successive spans that become one segment."""

    seconds: dict[_Key, float]
    started: float
    ended: float
    rounds: tuple[int, int]

    @classmethod
    def of(cls, span: Span) -> _Part:
        return cls({(span.activity, span.cause): span.seconds}, span.started, span.ended, (span.round, span.round))

    @property
    def main(self) -> _Key:
        return max(self.seconds, key=lambda key: self.seconds[key])

    def extend(self, other: _Part) -> None:
        for key, seconds in other.seconds.items():
            self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        self.ended = other.ended
        self.rounds = (min(self.rounds[0], other.rounds[0]), max(self.rounds[1], other.rounds[1]))

    def segment(self) -> Segment:
        others = sorted(((key, each) for key, each in self.seconds.items() if key != self.main), key=lambda x: -x[1])
        texts = tuple((activity_text(*key), seconds) for key, seconds in others)
        return Segment(*self.main, self.started, self.ended, self.rounds, texts)


def _merged(spans: Iterable[Span], shortest: float) -> list[Segment]:
    """Return the spans of one node as segments, of which none but the only one is shorter than ``shortest``."""
    parts: list[_Part] = []
    short: _Part | None = None  # spans that are together still too short to be seen
    for span in spans:
        part = _Part.of(span)
        if short is not None and (span.seconds < shortest or not parts):
            short.extend(part)
            part, short = short, None
        elif short is not None:
            parts[-1].extend(short)
            short = None
        if part.ended - part.started < shortest:
            short = part
        else:
            _append(parts, part)
    if short is not None and parts:
        parts[-1].extend(short)
    elif short is not None:
        parts.append(short)
    return [part.segment() for part in parts]


def _append(parts: list[_Part], part: _Part) -> None:
    """Append a part, or extend the last one if it has the same activity in the same round."""
    if parts and parts[-1].main == part.main and parts[-1].rounds[1] == part.rounds[0]:
        parts[-1].extend(part)
    else:
        parts.append(part)


def _marks(report: Report, picture: Picture) -> dict[str, list[Mark]]:
    """Return the injected faults, the losses that they do not explain, the failures and the checkpoints by node."""
    found: dict[str, list[Mark]] = {}
    injected = set()
    for fault in report.faults:
        added = fault.fault.startswith("add")
        for node in fault.nodes:
            if not added:
                injected.add(node)
            text = f"{'added' if added else 'injected fault'}: {fault.fault}, at step {fault.step}"
            found.setdefault(node, []).append(Mark("added" if added else "fault", fault.time, text))
    for kind, name in _MARKED.items():
        for event in picture.all(kind):
            found.setdefault(event.node, []).append(Mark(name, event.time, describe(event) or ""))
    lost: set[tuple[str, int]] = set()
    for reopened in picture.all(RoundReopened):
        for node in reopened.lost:
            if node not in injected and (node, reopened.round) not in lost:
                lost.add((node, reopened.round))
                text = f"lost in round {reopened.round}: {reopened.reason}"
                found.setdefault(node, []).append(Mark("loss", reopened.time, text))
    return {node: sorted(marks, key=lambda mark: mark.time) for node, marks in found.items()}


def _thinned(marks: Mapping[str, Sequence[Mark]], apart: float) -> dict[str, list[Mark]]:
    """Return the marks by node without those that would overlap an earlier one of their kind, or are too many."""
    while True:
        kept = {node: _apart(own, apart) for node, own in marks.items()}
        if not apart or sum(map(len, kept.values())) <= max(_MOST_MARKS, len(kept) * 5):
            return kept
        apart *= 2


def _apart(marks: Sequence[Mark], apart: float) -> list[Mark]:
    kept: list[Mark] = []
    last: dict[str, float] = {}
    for mark in marks:
        if mark.time - last.get(mark.kind, float("-inf")) >= apart:
            kept.append(mark)
            last[mark.kind] = mark.time
    return kept
