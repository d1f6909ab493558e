"""The report of a run: the content of ``report.json`` and the source of all pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger import accounting, timeline
from azureml_elastic.ledger.bill import Bill, NodeUse, Prices, Tier, bill
from azureml_elastic.ledger.events import NodeLeft, NodeStarted
from azureml_elastic.ledger.picture import NodeTime, Picture
from azureml_elastic.ledger.reading import EventReader, read_events, read_samples
from azureml_elastic.ledger.samples import SampleAudit, SampleLine, audit_samples, steps_undone, trained_samples

REPORT_FILE = "report.json"

RunState = Literal["succeeded", "failed", "interrupted", "unfinished"]
NodeEnding = Literal["running", "exited", "killed", "preempted", "frozen", "stopped", "unknown"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeSummary(_Record):
    """End of one node; ``leftovers`` is the number of processes that outlived its agent and were killed.

    ``began`` and ``ended`` are seconds since the epoch, by its events where nothing else tells. Compute, VM size,
    tier and price per hour are those of its pool, where they are known.
    """

    name: str
    exit_code: int | None = None
    ending: NodeEnding = "unknown"
    leftovers: int = 0
    began: float | None = None
    ended: float | None = None
    pool: str = ""
    size: str | None = None
    tier: Tier | None = None
    price_per_hour: float | None = None


class FaultRecord(_Record):
    """An injected fault with its affected or added nodes (none for a fault of the table) and its time."""

    fault: str
    nodes: tuple[str, ...]
    step: int
    time: float


class MissedFault(_Record):
    """A fault of the schedule that did not happen, and why."""

    fault: str
    reason: str


class Paths(_Record):
    """Paths of a run's files."""

    run_dir: Path
    events: Path
    logs: Path
    samples: Path
    checkpoints: Path
    report: Path

    @classmethod
    def of(cls, run_dir: Path) -> Paths:
        """Return the paths below a run folder."""
        folders = {name: run_dir / name for name in ("events", "logs", "samples", "checkpoints")}
        return cls(run_dir=run_dir, report=run_dir / REPORT_FILE, **folders)

    @property
    def report_part(self) -> Path:
        """The report while it is written."""
        return self.report.with_name(f"{REPORT_FILE}.part")


class Report(_Record):
    """Report of a run.

    Args:
        name: name of the run: that of its folder, or of the job as which it was submitted.
        run_id: name by which a run on this machine is found in its table, empty if it is not known.
        outcome: outcome of the run; ``unfinished`` if no end was recorded.
        resumed_from: folder of the run that the run has continued, whose samples are audited, too.
        world_sizes: world sizes of successive rounds that trained, equal neighbours merged.
        missed_faults: faults of the schedule that did not happen.
        audit: result of the sample audit, ``None`` without recorded samples.
        activities: seconds of all nodes by activity and cause, the largest first; their sum is the nodes' wall time.
        lost_steps: number of steps that were trained again after a loss.
        samples: number of samples in the steps that count; ``None`` if the script does not count them.
        bill: cost of the nodes; ``None`` if it was not requested.
        goodput: share of that time which is known to be training that was kept; ``None`` without events.
        highest_goodput: that share with the time of which this is unknown, as with a script without a session.
        skipped_events: number of unreadable lines in the event files.
    """

    version: Literal[1] = 1
    name: str = ""
    run_id: str = ""
    outcome: RunState
    exit_code: int
    message: str = ""
    resumed_from: Path | None = None
    world_sizes: tuple[int, ...] = ()
    rounds: tuple[timeline.RoundSpan, ...] = ()
    recoveries: tuple[timeline.RecoverySpan, ...] = ()
    nodes: tuple[NodeSummary, ...] = ()
    faults: tuple[FaultRecord, ...] = ()
    missed_faults: tuple[MissedFault, ...] = ()
    audit: SampleAudit | None = None
    activities: tuple[accounting.Total, ...] = ()
    lost_steps: int = 0
    samples: int | None = None
    goodput: float | None = None
    highest_goodput: float | None = None
    bill: Bill | None = None
    skipped_events: int = 0
    paths: Paths

    @property
    def last_step(self) -> int:
        """Last reported step."""
        return max((round_.last_step or 0 for round_ in self.rounds), default=0)

    def with_timeline(self, picture: Picture, losses: Iterable[tuple[str, float]] = ()) -> Report:
        """Return the report with the rounds, the recoveries and the accounting of the run.

        For the observed losses see :func:`~azureml_elastic.ledger.timeline.recoveries`.
        """
        rounds = tuple(timeline.rounds(picture))
        activities = tuple(accounting.totals(self.spans(picture)))
        lives = {name: {"began": time.began, "ended": time.ended} for name, time in self._times(picture).items()}
        return self.model_copy(
            update={
                "nodes": tuple(node.model_copy(update=lives.get(node.name)) for node in self.nodes),
                "rounds": rounds,
                "recoveries": tuple(timeline.recoveries(picture, losses)),
                "world_sizes": tuple(timeline.world_sizes(rounds)),
                "activities": activities,
                "lost_steps": sum(steps_undone(picture).values()),
                "samples": trained_samples(picture),
                "goodput": accounting.goodput(activities),
                "highest_goodput": accounting.highest_goodput(activities),
            }
        )

    def with_bill(
        self, picture: Picture, prices: Prices | None, spans: Sequence[accounting.Span] | None = None
    ) -> Report:
        """Return the report with the cost of its nodes.

        On dedicated nodes the same work takes the time of starting, training and saving; unknown time does not count,
        so that no saving is claimed for it.

        Args:
            prices: prices by VM size and tier; ``None`` for those of the job's pools.
            spans: result of :meth:`spans`, if the caller has it.
        """
        times = self._times(picture)
        needed: dict[str, float] = {}
        for span in self.spans(picture) if spans is None else spans:
            if span.activity in ("starting", "training", "saving"):
                needed[span.node] = needed.get(span.node, 0.0) + span.seconds
        uses = [
            NodeUse(
                seconds=times[node.name].seconds,
                pool=node.pool,
                size=node.size,
                tier=node.tier,
                price_per_hour=node.price_per_hour,
                needed_seconds=needed.get(node.name, 0.0),
            )
            for node in self.nodes
            if node.name in times
        ]
        return self.model_copy(update={"bill": bill(uses, prices)})

    def spans(self, picture: Picture) -> list[accounting.Span]:
        """Return what each node was doing over its whole lifetime."""
        return accounting.account(picture, self._times(picture))

    def _times(self, picture: Picture) -> dict[str, NodeTime]:
        """Return the nodes' lifetimes, by the events where nothing else tells."""
        recorded = {name: node.time for name, node in picture.nodes.items()}
        return recorded | {
            node.name: NodeTime(node.began, node.ended, node.ending == "running")
            for node in self.nodes
            if node.began is not None and node.ended is not None
        }

    def write(self) -> Path:
        """Replace the file atomically and return its path."""
        part = self.paths.report_part
        part.touch(0o600)
        part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(self.paths.report)
        return self.paths.report


def audit_folder(paths: Paths, picture: Picture, continued: Sequence[Path] = ()) -> SampleAudit | None:
    """Audit the run's recorded samples; return ``None`` if there are none.

    The rounds of the runs that the run has continued, in these folders from the first one on, come before its own.
    """
    lines: list[SampleLine] = []
    restored: dict[int, int] = {}
    all_torn = all_dropped = 0
    before = [(earlier.samples, Picture.of(read_events(earlier.events))) for earlier in map(Paths.of, continued)]
    for folder, known in (*before, (paths.samples, picture)):
        # Each run counts its rounds from 1: those of a later run follow the last one of the run before.
        number = max((0, *restored, *(line.round for line in lines)))
        own, torn, dropped = read_samples(folder)
        lines += [replace(line, round=number + line.round) for line in own]
        restored |= {number + own_number: step for own_number, step in known.restored.items()}
        all_torn, all_dropped = all_torn + torn, all_dropped + dropped
    return audit_samples(lines, restored, torn_lines=all_torn, dropped_lines=all_dropped) if lines else None


def load_report(run_dir: Path) -> Report:
    """Read a run's ``report.json``, or create the report from its events if the launcher was killed.

    Raises:
        UsageError: the folder is not a run folder, or its report cannot be read.
    """
    paths = Paths.of(run_dir)
    if paths.report.is_file():
        try:
            return Report.model_validate_json(paths.report.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(
                f"{paths.report} cannot be read ({first['msg']}). Delete it to recreate it from the events."
            ) from error
    reader = EventReader(paths.events)
    events = reader.read()
    if not events:
        raise UsageError(
            f"{run_dir} contains neither {REPORT_FILE} nor events of a run. Give the folder that "
            "'azureml-elastic local' printed at its end (--run-dir, or one below ./runs)."
        )
    return report_of(paths, Picture.of(events), skipped=reader.skipped)


def report_of(paths: Paths, picture: Picture, *, skipped: int = 0) -> Report:
    """Return the report of a run of which nothing but its events and samples is known.

    ``skipped`` is the number of unreadable lines in the event files.
    """
    nodes = {event.node: NodeSummary(name=event.node) for event in picture.all(NodeStarted)}
    for event in picture.all(NodeLeft):
        if event.node in nodes:
            nodes[event.node] = NodeSummary(name=event.node, exit_code=event.exit_code, ending="exited")
    ended = picture.ended
    outcome: RunState = "unfinished" if ended is None else "succeeded" if ended.succeeded else "failed"
    report = Report(
        name=paths.run_dir.name,
        paths=paths,
        outcome=outcome,
        exit_code=0 if outcome == "succeeded" else 1,
        message="" if ended is None else ended.message,
        nodes=tuple(nodes.values()),
        audit=audit_folder(paths, picture),
        skipped_events=skipped,
    )
    return report.with_timeline(picture)
