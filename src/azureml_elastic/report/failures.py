"""Failures of a run and what else needs attention, as the page lists them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from azureml_elastic.ledger.events import (
    CheckpointQuarantined,
    Event,
    HangDetected,
    HealthChecked,
    HostQuarantined,
    HostStruck,
    Unreachable,
    WorkerFailed,
)
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.sentences import describe, headline
from azureml_elastic.ledger.summary import Report
from azureml_elastic.report.cells import duration_text

_KINDS: dict[type[Event], str] = {
    WorkerFailed: "worker failed",
    HangDetected: "hang",
    CheckpointQuarantined: "damaged checkpoint",
    Unreachable: "unreachable",
    HealthChecked: "health of a node",
    HostStruck: "strike",
    HostQuarantined: "quarantined host",
}
_MOST = 100
_LONGEST = 12_000
_LONGEST_TOGETHER = 240_000
"""Most characters of one message, and of all."""


@dataclass(frozen=True)
class Failure:
    """A failure.

    Args:
        where: node, round and step.
        details: whole message, such as a traceback; empty if the summary says it all.
    """

    kind: str
    where: str
    summary: str
    details: str = ""


def failures(report: Report, picture: Picture, start: float) -> list[Failure]:
    """Return the failures in the order in which they were recorded, and those of the schedule that did not happen.

    Args:
        start: time from which times count.
    """
    found = []
    for event in sorted((event for kind in _KINDS for event in picture.all(kind)), key=lambda event: event.time):
        text = describe(event)
        if text is not None:
            at = f"{event.node}, {duration_text(max(0.0, event.time - start))} after the start"
            where = f"{at}, round {event.round}" if event.round else at
            found.append(Failure(_KINDS[type(event)], where, text[0].upper() + text[1:], _details(event)))
    found += [
        Failure("fault not injected", "", f"The fault {missed.fault} did not happen: {missed.reason}")
        for missed in report.missed_faults
    ]
    left_out = len(found) - _MOST
    if left_out > 0:
        found = [*found[:_MOST], Failure("further failures", "", f"{left_out:,} more are in the event files.")]
    return list(_cut(found))


def _details(event: Event) -> str:
    """Return the whole text of which the description has one line, empty if it is no more than that."""
    text = event.message if isinstance(event, WorkerFailed) else ""
    if isinstance(event, CheckpointQuarantined):
        text = event.problems
    return "" if text.strip() == headline(text) else text


def _cut(found: Iterable[Failure]) -> Iterator[Failure]:
    """Return the failures with messages of limited length; of a long one the beginning and the end."""
    left = _LONGEST_TOGETHER
    for failure in found:
        text = failure.details
        longest = max(0, min(_LONGEST, left))
        if len(text) > longest:
            half = longest // 2
            dropped = len(text) - 2 * half
            text = f"{text[:half]}\n[{dropped:,} characters are left out]\n{text[len(text) - half :]}"
        left -= len(text)
        yield replace(failure, details=text, summary=_shortened(failure.summary))


def _shortened(text: str, longest: int = 600) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"
