"""Restart policy: whether the run continues after a worker's failure. Pure functions.

Every failure that another node does not explain is a :class:`FailureRecord` in the round's row and is carried from
round to round, so that the budget belongs to the run and survives the loss of any node. The age of a record is the sum
of the durations of the rounds since, each measured by the monotonic clock of the node that ended the round.

Four rules, in this order:

1. *A loss or weights that are not finite* end the run at once, where the checkpoint policy says so.
2. *The same error without progress* at the same world size ends the run at once, unless nodes wait that make another
   size. Without a session there is progress once the workers have connected to each other.
3. *An unexplained broken connection* is free while the run makes progress. Without progress, at most
   ``max_failed_rounds`` rounds in a row may end so, and one that lasted more than a minute is charged.
4. *Any other failure* is charged: ``max_restarts`` restarts within an hour. A record expires when it is
   older than the window *and* the run has made progress since; by age alone, a run could fail at one step for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from azureml_elastic.config import ElasticDistribution

FailureKind = Literal[
    "out_of_memory", "peer", "import", "user", "killed", "crashed", "exit", "hang", "timeout", "nonfinite", "store"
]
"""Kind of failure; ``docs/explanation/failures.md`` describes the classification."""

MAX_RECORDS = 64
"""Maximum number of records in a row (less than 20 KiB); the oldest are merged."""

_CLOCK_SECONDS = 1.0
"""Tolerance for an age that was taken a moment before the duration of the round."""

_WINDOW_SECONDS = 3600.0  # stops a program that fails in a loop, and tolerates failures too rare to cost much time
_FREE_SECONDS = 60.0
"""Maximum duration of a round without progress whose broken connection is not charged."""


@dataclass(frozen=True)
class FailureRecord:
    """Failure of a worker, as stored in the round's row.

    Args:
        signature: identifier of the error, equal on all ranks, nodes and processes.
        step: last step that the node's workers completed; ``None`` without a session.
        exit_code: exit code as a shell reports it.
        age_seconds: duration of the rounds since.
        charge: number of charged failures: 0 if free, more than 1 after a merge.
        connected: whether the workers of the round had begun to connect to each other, as far as is known.
        world_size: number of workers of the round; 0 for unknown.
    """

    signature: str
    kind: FailureKind
    step: int | None
    node: str
    rank: int
    exit_code: int
    age_seconds: float = 0.0
    charge: int = 1
    connected: bool = True
    world_size: int = 0

    @property
    def process(self) -> str:
        """What has failed, as the end of a sentence."""
        what = "the process of the round's store" if self.kind == "store" else f"worker {self.rank}"
        return f"{what} on {self.node}"


@dataclass(frozen=True)
class Failure:
    """Failure of a worker, or of another process of its node on which the workers depend.

    Args:
        exit_code: exit code as a shell reports it: 128 + n after signal n.
        message: the fatal traceback, else the last lines of standard error.
        signature: identifier of the error, equal on all ranks, nodes and processes.
        conclusive: whether two failures with this signature are certainly the same error.
    """

    rank: int
    exit_code: int
    message: str
    kind: FailureKind = "user"
    signature: str = ""
    conclusive: bool = False

    def record(self, node: str, step: int | None, *, connected: bool = True, world_size: int = 0) -> FailureRecord:
        """Return the record for the round's row.

        Args:
            step: last completed step of the node, if known.
            connected: whether the workers of the round had begun to connect to each other, as far as is known.
            world_size: number of workers of the round; 0 for unknown.
        """
        return FailureRecord(
            self.signature, self.kind, step, node, self.rank, self.exit_code, connected=connected, world_size=world_size
        )


@dataclass(frozen=True)
class RestartDecision:
    """Decision after a failure.

    Args:
        restart: whether another round follows; otherwise the run is closed as failed.
        failures: records for the row of the next round.
        round_failed: whether the round counts towards ``max_failed_rounds``.
        why: explanation for the log or the run's closing message.
    """

    restart: bool
    failures: tuple[FailureRecord, ...]
    round_failed: bool
    why: str


def read_records(value: object) -> tuple[FailureRecord, ...]:
    """Return the records in a row's value; unknown fields and forms, of later releases, are ignored."""
    rows: Sequence[Any] = value if isinstance(value, (list, tuple)) else ()
    names = FailureRecord.__dataclass_fields__
    return tuple(
        FailureRecord(**{name: row[name] for name in names if name in row}) for row in rows if isinstance(row, Mapping)
    )


def aged(records: Sequence[FailureRecord], seconds: float) -> tuple[FailureRecord, ...]:
    """Return the records after a round of this duration."""
    return tuple(replace(record, age_seconds=round(record.age_seconds + max(0.0, seconds), 3)) for record in records)


def decide_restart(
    history: Sequence[FailureRecord],
    failure: FailureRecord,
    distribution: ElasticDistribution,
    *,
    conclusive: bool,
    seconds: float,
    failed_rounds: int,
    max_failed_rounds: int,
    next_size: int = 0,
) -> RestartDecision:
    """Decide about a failure that neither a lost node nor another worker's failure explains.

    Args:
        history: earlier failures of the run, oldest first, aged by the round that ends.
        distribution: limits ``max_restarts``.
        conclusive: whether two failures with this signature are certainly the same error.
        seconds: duration of the round.
        failed_rounds: number of consecutive failed rounds before this one.
        max_failed_rounds: number of them that ends the run.
        next_size: number of workers of the next round, with the nodes that wait; 0 for unknown.
    """
    kept = _unexpired(history, failure)
    earlier = _same_without_progress(kept, failure, seconds) if conclusive else None
    # What needs a certain world size, such as a sharded state, is loaded with another one, the rest fails there, too.
    resized = earlier is not None and failure.kind != "import" and next_size not in (0, failure.world_size)
    if failure.kind == "nonfinite":
        why = 'on_nonfinite="stop" ends the run.'
        return RestartDecision(restart=False, failures=_merged((*kept, failure)), round_failed=False, why=why)
    if earlier is not None and not resized:
        at = "" if earlier.step is None else f" at step {earlier.step}"
        since = "the workers have not begun to connect to each other since"
        since = since if not failure.connected else "no further step has been completed since"
        why = (
            f"The same error ended {earlier.process}{at} about {_span(earlier.age_seconds)} "
            f"before, and {since}. It is not restarted, because it would fail again."
        )
        return RestartDecision(restart=False, failures=_merged((*kept, failure)), round_failed=False, why=why)
    # Progress is a step beyond the furthest one at which a connection broke before: a network that fails now and then
    # costs a run nothing, one that fails at the same step each time is counted.
    furthest = max((_step(record) for record in kept if record.kind == "peer"), default=0)
    no_progress = failure.kind == "peer" and _step(failure) <= furthest
    free = failure.kind == "peer" and (not no_progress or seconds < _FREE_SECONDS)
    failures = _merged((*kept, replace(failure, charge=0 if free else 1)))
    charged = sum(record.charge for record in failures)
    max_restarts = distribution.max_restarts
    span = f"within {_span(_WINDOW_SECONDS)}"
    restart = False
    if no_progress and failed_rounds + 1 >= max_failed_rounds:
        why = (
            f"{failed_rounds + 1} consecutive rounds ended in this way without progress and without a lost node or "
            f"failed worker as an explanation; the limit is max_failed_rounds={max_failed_rounds}."
        )
    elif not free and charged > max_restarts:
        why = f"It is failure {charged} {span}, and max_restarts={max_restarts} allows {max_restarts}."
    else:
        restart = True
        why = f"restart {charged} of {max_restarts} {span}"
        if free:
            why = "restart without charge: a connection broke, and neither a lost node nor a failed worker explains it"
        elif resized:
            why += (
                f"; the error is the same as before, but the world size changes from {failure.world_size} to "
                f"{next_size}, as nodes wait"
            )
    return RestartDecision(restart=restart, failures=failures, round_failed=no_progress, why=why)


def _step(record: FailureRecord) -> int:
    return record.step or 0


def _unexpired(history: Sequence[FailureRecord], failure: FailureRecord) -> tuple[FailureRecord, ...]:
    """Return the records that are within the window or at a step that the run has not passed since."""
    kept: list[FailureRecord] = []
    furthest = _step(failure)
    # From the newest to the oldest: whether the run has passed the step of a failure shows in the later ones.
    for record in reversed(history):
        if record.age_seconds <= _WINDOW_SECONDS or furthest <= _step(record):
            kept.append(record)
        furthest = max(furthest, _step(record))
    return tuple(reversed(kept))


def _same_without_progress(
    history: Sequence[FailureRecord], failure: FailureRecord, seconds: float
) -> FailureRecord | None:
    """Return the furthest earlier failure with this signature and world size, if the run has made no progress since.

    Unknown steps (a program without a session) do not prove a lack of progress, unless the program was not even loaded,
    or this round and the one before have failed before the workers began to connect.
    """
    if failure.kind != "import" and failure.step is None:
        last = history[-1] if history else None
        if failure.connected or last is None or last.connected or not _is_same(last, failure):
            return None
        return last if last.age_seconds <= seconds + _CLOCK_SECONDS else None  # else other rounds came between
    same = [record for record in history if _is_same(record, failure)]
    furthest = max(same, key=_step, default=None)
    return None if furthest is None or _step(failure) > _step(furthest) else furthest


def _is_same(record: FailureRecord, failure: FailureRecord) -> bool:
    """Return whether two failures are the same error under the same conditions."""
    same_size = failure.kind == "import" or record.world_size in (0, failure.world_size)
    return same_size and record.signature == failure.signature


def _merged(records: Sequence[FailureRecord]) -> tuple[FailureRecord, ...]:
    """Return at most ``MAX_RECORDS`` records: the oldest are merged into one, with their total charge."""
    extra = max(0, len(records) - MAX_RECORDS)
    oldest = replace(records[extra], charge=sum(record.charge for record in records[: extra + 1]))
    return (oldest, *records[extra + 1 :])


def _span(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
