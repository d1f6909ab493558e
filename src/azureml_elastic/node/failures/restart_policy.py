"""Whether a run goes on after a worker's failure. Pure functions over the failures that the round's row carries.

Each failure that was no other node's fault is a :class:`FailureRecord` in the row of the round, and moves from round to
round with it, so that the budget is the whole run's and survives any node. An age is a sum of durations: the node that
ends a round adds the duration of that round by its own monotonic clock, so no two clocks are compared. The time between
two rounds is not counted, so that records expire a little later, never earlier.

Three rules, in this order:

1. *The same error without progress* ends the run at once: it would only happen again.
2. *A broken connection that nothing explains* costs nothing while the run makes progress. Without any, at most
   ``max_failed_rounds`` rounds in a row may end so, and one that wasted more than a minute is charged like a crash.
3. *Anything else* spends the budget: ``max_restarts`` restarts within ``restart_window``. A failure is forgotten when
   it is older than that *and* the run has got further since. Age alone would let a run that dies at the same step every
   25 minutes go on for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from azureml_elastic.config import ElasticDistribution

__all__ = ["MAX_RECORDS", "FailureKind", "FailureRecord", "RestartDecision", "aged", "decide_restart", "read_records"]

FailureKind = Literal["out_of_memory", "peer", "import", "user", "killed", "crashed", "exit", "hang"]
"""Kind of failure; ``docs/explanation/failures.md`` describes the classification."""

MAX_RECORDS = 64
"""Records of one row; older ones are merged. With signatures of at most 120 characters they take under 20 KiB."""

_CHEAP_SECONDS = 60.0
"""How long a round may last for a broken connection to cost nothing although the run got no further."""


@dataclass(frozen=True)
class FailureRecord:
    """A worker's failure, as the round's row keeps it.

    Args:
        signature: the same for the same error on any rank, node or process.
        kind: what ended the worker.
        step: the furthest step that the node's workers had completed; ``None`` where they have no session to tell.
        node: where it ran.
        rank: its global rank.
        exit_code: exit code as a shell reports it.
        age_seconds: how long the rounds since have lasted.
        charge: how many failures of the budget it stands for: 0 for a consequence, more than 1 after a merge.
    """

    signature: str
    kind: FailureKind
    step: int | None
    node: str
    rank: int
    exit_code: int
    age_seconds: float = 0.0
    charge: int = 1


@dataclass(frozen=True)
class RestartDecision:
    """What follows from a failure.

    Args:
        restart: whether another round is to form; otherwise the run is to be closed as failed.
        failures: failures for the row of the next round.
        round_failed: whether the round counts as one whose nodes could not reach each other.
        why: one sentence, for the log or for the run's last message.
    """

    restart: bool
    failures: tuple[FailureRecord, ...]
    round_failed: bool
    why: str


def read_records(value: object) -> tuple[FailureRecord, ...]:
    """Return the records of a row's value; fields of later releases are ignored, and so are whole unknown forms."""
    rows: Sequence[Any] = value if isinstance(value, (list, tuple)) else ()
    names = FailureRecord.__dataclass_fields__
    return tuple(
        FailureRecord(**{name: row[name] for name in names if name in row}) for row in rows if isinstance(row, Mapping)
    )


def aged(records: Sequence[FailureRecord], seconds: float) -> tuple[FailureRecord, ...]:
    """Return the records when a round of this length has ended."""
    return tuple(replace(record, age_seconds=round(record.age_seconds + max(0.0, seconds), 3)) for record in records)


def decide_restart(
    history: Sequence[FailureRecord],
    failure: FailureRecord,
    terms: ElasticDistribution,
    *,
    conclusive: bool,
    seconds: float,
    failed_rounds: int,
) -> RestartDecision:
    """Decide what follows from a failure that neither a lost node nor another worker's failure explains.

    Args:
        history: the run's failures so far, oldest first, aged by the round that ends.
        failure: what happened now.
        terms: ``max_restarts``, ``restart_window`` and ``max_failed_rounds``.
        conclusive: whether two failures with this signature are surely the same error.
        seconds: how long the round lasted.
        failed_rounds: number of consecutive failed rounds before this one
    """
    window = None if terms.restart_window is None else terms.restart_window.total_seconds()
    kept = _remembered(history, failure, window)
    earlier = _same_without_progress(kept, failure) if conclusive else None
    if earlier is not None:
        return RestartDecision(
            restart=False, failures=_merged((*kept, failure)), round_failed=False, why=_same_again(earlier)
        )
    in_vain = failure.kind == "peer" and _step(failure) <= max(
        (_step(record) for record in kept if record.kind == "peer"), default=0
    )
    charged = replace(failure, charge=0 if failure.kind == "peer" and (not in_vain or seconds < _CHEAP_SECONDS) else 1)
    failures = _merged((*kept, charged))
    if in_vain and failed_rounds + 1 >= terms.rendezvous.timings.max_failed_rounds:
        why = (
            f"It is the {_nth(failed_rounds + 1)} round in a row that ended so without progress, and no node was lost "
            f"and no worker failed that would explain it; the limit is "
            f"max_failed_rounds={terms.rendezvous.timings.max_failed_rounds}."
        )
        return RestartDecision(restart=False, failures=failures, round_failed=True, why=why)
    spent = sum(record.charge for record in failures)
    span = "of the run" if window is None else f"within {_span(window)}"
    if charged.charge and spent > terms.max_restarts:
        why = f"It is failure {spent} {span}, and max_restarts={terms.max_restarts} allows {terms.max_restarts}."
        return RestartDecision(restart=False, failures=failures, round_failed=in_vain, why=why)
    if charged.charge:
        why = f"restart {spent} of {terms.max_restarts} {span}"
    else:
        why = "restart without charge: a connection broke, and neither a lost node nor a failed worker explains it"
    return RestartDecision(restart=True, failures=failures, round_failed=in_vain, why=why)


def _step(record: FailureRecord) -> int:
    return record.step or 0


def _remembered(
    history: Sequence[FailureRecord], failure: FailureRecord, window: float | None
) -> tuple[FailureRecord, ...]:
    """Return the records that still count: young ones, and those that the run has not got beyond since."""
    kept: list[FailureRecord] = []
    furthest = _step(failure)
    for record in reversed(history):
        if window is None or record.age_seconds <= window or furthest <= _step(record):
            kept.append(record)
        furthest = max(furthest, _step(record))
    return tuple(reversed(kept))


def _same_without_progress(history: Sequence[FailureRecord], failure: FailureRecord) -> FailureRecord | None:
    """Return the furthest earlier failure of this signature, if the run has not got beyond it.

    Steps that nobody reports (a program without a session) are no proof of a standstill, except where the program
    could not even be loaded.
    """
    same = [record for record in history if record.signature == failure.signature]
    if failure.kind != "import" and failure.step is None:
        return None
    furthest = max(same, key=_step, default=None)
    if furthest is None or _step(failure) > _step(furthest):
        return None
    return furthest


def _merged(records: Sequence[FailureRecord]) -> tuple[FailureRecord, ...]:
    """Return at most ``MAX_RECORDS`` records: the two oldest become the younger one, with the charge of both."""
    merged = list(records)
    while len(merged) > MAX_RECORDS:
        first, second = merged[:2]
        merged[:2] = [replace(second, charge=first.charge + second.charge)]
    return tuple(merged)


def _same_again(earlier: FailureRecord) -> str:
    at = "" if earlier.step is None else f" at step {earlier.step}"
    return (
        f"The same error ended worker {earlier.rank} on {earlier.node}{at} about {_span(earlier.age_seconds)} before, "
        "and no further step has been completed since: it would only happen again, so the run is not restarted."
    )


def _span(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _nth(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
