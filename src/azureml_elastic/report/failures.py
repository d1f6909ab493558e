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
from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import headline
from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import duration_text

__all__ = ["Failure", "failures"]

_MOST = 100
_LONGEST = 12_000
_LONGEST_TOGETHER = 240_000
"""Most characters of one message, and of all."""


@dataclass(frozen=True)
class Failure:
    """A failure.

    Args:
        where: node, round and step.
        summary: one line.
        details: whole message, such as a traceback; empty if the summary says it all.
    """

    kind: str
    where: str
    summary: str
    details: str = ""


def failures(report: Report, events: Iterable[Event], start: float) -> list[Failure]:
    """Return the failures in the order in which they were recorded, and those of the schedule that did not happen.

    Args:
        start: time from which times count.
    """
    found = []
    for event in sorted(events, key=lambda event: event.time):
        failure = _failure(event)
        if failure is not None:
            at = f"{event.node}, {duration_text(max(0.0, event.time - start))} after the start"
            found.append(replace(failure, where=f"{at}, round {event.round}" if event.round else at))
    found += [
        Failure("fault not injected", "", f"The fault {missed.fault} did not happen: {missed.reason}")
        for missed in report.missed_faults
    ]
    left_out = len(found) - _MOST
    if left_out > 0:
        found = [*found[:_MOST], Failure("further failures", "", f"{left_out:,} more are in the event files.")]
    return list(_cut(found))


def _failure(event: Event) -> Failure | None:
    if isinstance(event, WorkerFailed):
        kind = event.failure_kind.replace("_", " ")
        said = headline(event.message)
        text = f"{event.process[0].upper()}{event.process[1:]} failed with exit code {event.exit_code}" + (
            f" ({kind})" if kind else ""
        )
        text += f" after step {event.step}" if event.step is not None else ""
        details = event.message if event.message.strip() != said else ""
        return Failure("worker failed", "", f"{text}: {said}" if said else f"{text}.", details)
    if isinstance(event, HangDetected):
        text = f"No step for {event.seconds:.1f} s (limit {event.limit_seconds:.1f} s) after step {event.step}."
        return Failure("hang", "", f"{text} The stacks of all workers are in the nodes' logs.")
    if isinstance(event, CheckpointQuarantined):
        text = f"The checkpoint {event.directory} was damaged, and an older one was used."
        return Failure("damaged checkpoint", "", text, event.problems)
    if isinstance(event, Unreachable):
        text = f"{event.host} cannot reach {event.peer} ({event.address}), {event.purpose}: {headline(event.error)}"
        return Failure("unreachable", "", text)
    if isinstance(event, HealthChecked) and event.problems:
        kind = "unhealthy node" if event.status == "fail" else "health warning"
        return Failure(kind, "", "; ".join(map(headline, event.problems)))
    if isinstance(event, HostStruck):
        return Failure("strike", "", f"A strike against {event.host}: {headline(event.reason)}")
    if isinstance(event, HostQuarantined):
        return Failure("quarantined host", "", f"{counted(event.strikes, 'strike')} against {event.host}.")
    return None


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
