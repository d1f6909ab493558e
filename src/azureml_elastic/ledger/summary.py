"""The summary of a run, as it is written to ``report.json`` and as the pictures are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger import timeline
from azureml_elastic.ledger.events import Event, NodeLeft, NodeStarted
from azureml_elastic.ledger.reading import EventReader, read_samples
from azureml_elastic.ledger.samples import SampleAudit, audit_samples, restored_steps

__all__ = [
    "FaultRecord",
    "NodeEnding",
    "NodeSummary",
    "Paths",
    "Report",
    "RunState",
    "audit_folder",
    "load_report",
    "summarise",
]

REPORT_FILE = "report.json"

RunState = Literal["succeeded", "failed", "interrupted", "unfinished"]
NodeEnding = Literal["running", "exited", "killed", "preempted", "frozen", "stopped", "unknown"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeSummary(_Record):
    """One node's end. ``leftovers`` counts the processes that outlived its agent and had to be ended."""

    name: str
    exit_code: int | None = None
    ending: NodeEnding = "unknown"
    leftovers: int = 0


class FaultRecord(_Record):
    """A fault that was injected, the nodes that it hit or added (none: its target had gone before) and when."""

    fault: str
    nodes: tuple[str, ...]
    step: int
    time: float


class Paths(_Record):
    """Where the run's files are."""

    run_dir: Path
    events: Path
    logs: Path
    samples: Path
    checkpoints: Path
    report: Path

    @classmethod
    def of(cls, run_dir: Path) -> Paths:
        """Return the layout of a run's folder."""
        return cls(
            run_dir=run_dir,
            events=run_dir / "events",
            logs=run_dir / "logs",
            samples=run_dir / "samples",
            checkpoints=run_dir / "checkpoints",
            report=run_dir / REPORT_FILE,
        )


class Report(_Record):
    """What became of a run.

    Args:
        outcome: ``unfinished`` where nobody saw the end.
        exit_code: 0 when the run ended well.
        message: why it did not.
        world_sizes: of the successive rounds that trained, equal neighbours merged.
        audit: the proof of "exactly once", ``None`` where no samples were written down.
        skipped_events: lines of the event files that could not be read.
    """

    version: Literal[1] = 1
    run_id: str = ""
    outcome: RunState
    exit_code: int
    message: str = ""
    world_sizes: tuple[int, ...] = ()
    rounds: tuple[timeline.RoundSpan, ...] = ()
    recoveries: tuple[timeline.RecoverySpan, ...] = ()
    nodes: tuple[NodeSummary, ...] = ()
    faults: tuple[FaultRecord, ...] = ()
    audit: SampleAudit | None = None
    skipped_events: int = 0
    paths: Paths

    @property
    def last_step(self) -> int:
        """The last step that was reported."""
        return max((round_.last_step or 0 for round_ in self.rounds), default=0)

    def write(self) -> Path:
        """Write the file and return its path."""
        self.paths.report.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return self.paths.report


def audit_folder(paths: Paths, events: Sequence[Event]) -> SampleAudit | None:
    """Check the run's audit files; ``None`` where there are none."""
    lines, torn = read_samples(paths.samples)
    return audit_samples(lines, restored_steps(events), torn_lines=torn) if lines else None


def summarise(
    events: Sequence[Event],
    *,
    paths: Paths,
    outcome: RunState,
    exit_code: int,
    message: str = "",
    run_id: str = "",
    nodes: Sequence[NodeSummary] = (),
    faults: Sequence[FaultRecord] = (),
    audit: SampleAudit | None = None,
    losses: Sequence[tuple[str, float]] = (),
    skipped_events: int = 0,
) -> Report:
    """Make the report of a run from its events and from what its starter knows.

    Args:
        events: of all nodes.
        paths: the run's files.
        outcome: see :class:`Report`.
        exit_code: see :class:`Report`.
        message: see :class:`Report`.
        run_id: names the run in the table.
        nodes: in the order of their starts.
        faults: in the order of their injection.
        audit: see :class:`Report`.
        losses: see :func:`~azureml_elastic.ledger.timeline.recoveries`.
        skipped_events: see :class:`Report`.
    """
    rounds = timeline.rounds(events)
    return Report(
        run_id=run_id,
        outcome=outcome,
        exit_code=exit_code,
        message=message,
        world_sizes=tuple(timeline.world_sizes(rounds)),
        rounds=tuple(rounds),
        recoveries=tuple(timeline.recoveries(events, losses)),
        nodes=tuple(nodes),
        faults=tuple(faults),
        audit=audit,
        skipped_events=skipped_events,
        paths=paths,
    )


def load_report(run_dir: Path) -> Report:
    """Read a run's ``report.json``, or make one from its events where the launcher did not live to write it.

    Raises:
        UsageError: the folder is no run's, or its report cannot be read.
    """
    paths = Paths.of(run_dir)
    if paths.report.is_file():
        try:
            return Report.model_validate_json(paths.report.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(
                f"{paths.report} cannot be read ({first['msg']}). Delete it to have it made anew from the events."
            ) from error
    reader = EventReader(paths.events)
    events = reader.read()
    if not events:
        raise UsageError(
            f"{run_dir} holds neither {REPORT_FILE} nor events of a run. Give the folder that "
            "'azureml-elastic local' named at its end (--run-dir, or one below ./runs)."
        )
    ending = timeline.outcome(events)
    return summarise(
        events,
        paths=paths,
        outcome=ending.state,
        exit_code=0 if ending.state == "succeeded" else 1,
        message=ending.message,
        nodes=_nodes(events),
        audit=audit_folder(paths, events),
        skipped_events=reader.skipped,
    )


def _nodes(events: Sequence[Event]) -> list[NodeSummary]:
    """Return what the nodes themselves said about their ends."""
    names = list(dict.fromkeys(event.node for event in events if isinstance(event, NodeStarted)))
    left = {event.node: event for event in events if isinstance(event, NodeLeft)}
    return [
        NodeSummary(name=name, exit_code=left[name].exit_code, ending="exited")
        if name in left
        else NodeSummary(name=name)
        for name in names
    ]
