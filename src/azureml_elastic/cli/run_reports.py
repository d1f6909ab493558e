"""Reports of the run that a command's argument names: from the folder of a local run, or from Azure ML."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.cli.submitted_run import open_run, open_run_table, run_folder
from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from azureml_elastic.cli.workspace_jobs import Jobs
    from azureml_elastic.ledger.bill import Prices
    from azureml_elastic.ledger.events import Event
    from azureml_elastic.ledger.summary import NodeSummary, Report
    from azureml_elastic.submit.run import ElasticRun, NodeOfRun

_QUIET_SECONDS = 30.0
"""Time without an event after which a run that has ended without a report gets none."""


@dataclass(frozen=True)
class RunReport:
    """Report of a run at a moment, the events of all its nodes, and whether it goes on."""

    report: Report
    events: Sequence[Event]
    running: bool


def open_reports(run: str, folder: Path | None, prices: Path | None) -> LocalRunReports | SubmittedRunReports:
    """Return the source of the reports of a run.

    Args:
        run: folder of a local run, or name of a submitted one.
        folder: folder for the files of a submitted run; ``None`` for ``runs/RUN``.
        prices: file of prices; ``None`` for those of the job's pools.

    Raises:
        UsageError: there is no such folder, or the prices are invalid.
    """
    from azureml_elastic.ledger.bill import load_prices

    given = None if prices is None else load_prices(prices)
    local = run_folder(run)
    if local is not None and folder is None:
        return LocalRunReports(local, given)
    if local is not None and local.name != run:
        raise UsageError(f"--to is for the events of a submitted run, and {run} is the folder of a run. Leave it out.")
    jobs, submitted, variables = open_run(run)
    return SubmittedRunReports(jobs, submitted, variables, folder or Path("runs") / submitted.name, given)


class LocalRunReports:
    """Reports from the folder of a run, which may still run.

    Args:
        prices: prices of the nodes; ``None`` for no bill other than that of the report.
    """

    def __init__(self, folder: Path, prices: Prices | None = None) -> None:
        from azureml_elastic.ledger.reading import EventReader
        from azureml_elastic.ledger.summary import Paths

        self.name = folder.absolute().name
        self._folder = folder
        self._prices = prices
        self._paths = Paths.of(folder.absolute())
        self._reader = EventReader(self._paths.events)
        self._events: list[Event] = []

    def read(self) -> RunReport:
        """Return the report that the launcher has written, otherwise one of the events so far.

        Raises:
            UsageError: the folder has neither of them.
        """
        from azureml_elastic.ledger.summary import load_report, report_of_events

        written = self._paths.report.is_file()  # before the events, so that none is missed
        self._events += self._reader.read()
        if written or not self._events:
            report = load_report(self._folder)
        else:
            report = report_of_events(self._paths, self._events, skipped=self._reader.skipped)
        if self._prices is not None:
            report = report.with_bill(self._events, self._prices)
        return RunReport(report, tuple(self._events), running=not written and not self._is_over(report))

    def _is_over(self, report: Report) -> bool:
        """Return whether a run that was not launched here, or whose launcher was killed, has ended."""
        last = max((event.time for event in self._events), default=0.0)
        return report.outcome != "unfinished" and time.time() - last > _QUIET_SECONDS


class SubmittedRunReports:
    """Reports of a submitted run, from its table and the run history.

    Args:
        variables: environment variables that identify the workspace.
        folder: folder for the files of the run.
        prices: prices of the nodes; ``None`` for those of the job's pools.
    """

    def __init__(
        self,
        jobs: Jobs,
        submitted: ElasticRun,
        variables: Mapping[str, str],
        folder: Path,
        prices: Prices | None = None,
    ) -> None:
        from azureml_elastic.ledger.summary import Paths

        self.name = submitted.name
        self._jobs = jobs
        self._submitted = submitted
        self._variables = variables
        self._paths = Paths.of(folder.absolute())
        self._prices = prices

    def read(self) -> RunReport:
        """Return the report of what the table and the run history have now.

        Raises:
            ElasticError: they cannot be read, or no node has started.
        """
        from azureml_elastic.ledger.reading import NodeNames
        from azureml_elastic.ledger.summary import report_of_events
        from azureml_elastic.node.records.observation import read_event_rows

        submitted = self._submitted
        jobs = submitted.nodes()
        times = {job.job: self._jobs.times(job.job) for job in jobs}
        machines = {job.node: self._jobs.machine(submitted, job) for job in jobs}
        with open_run_table(submitted, self._variables) as table:
            rows, skipped = read_event_rows(table)
        if not rows:
            raise UsageError(
                f"The table of {submitted.name} has no events: no node has started, or the rows were deleted. "
                f"'azureml-elastic status {submitted.name}' shows the jobs."
            )
        labels = {job.job: job.node for job in jobs}
        events = NodeNames(labels.get).apply(rows)
        made = report_of_events(self._paths, events, skipped=skipped)
        nodes = tuple(
            _with_times(node, events, jobs, times).model_copy(update=vars(machines[_job_node(node)]))
            for node in made.nodes
        )
        made = made.model_copy(update={"name": submitted.name, "nodes": nodes})
        made = made.with_timeline(events).with_bill(events, self._prices)
        return RunReport(made, events, running=any(job.active for job in jobs))

    def write(self, found: RunReport) -> None:
        """Write the events and the report to the run's folder.

        Raises:
            UsageError: the folder cannot be written.
        """
        _write_events(self._paths.events, found.events)
        found.report.write()


def _job_node(node: NodeSummary) -> str:
    """Return the name of a node's job: several nodes of one job are numbered."""
    return node.name.partition(".")[0]


def _write_events(folder: Path, events: Sequence[Event]) -> None:
    """Replace the event files of a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.jsonl"):
            path.unlink()
        for event in events:
            with (folder / f"{event.node}.jsonl").open("a", encoding="utf-8") as file:
                file.write(event.model_dump_json() + "\n")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error}). Give another folder by --to.") from error


def _with_times(
    node: NodeSummary,
    events: Sequence[Event],
    jobs: Sequence[NodeOfRun],
    times: Mapping[str, tuple[datetime | None, datetime | None]],
) -> NodeSummary:
    """Return the node with its lifetime, whose end only the run history knows if the node was lost."""
    own = [event for event in events if event.node == node.name]
    ends = [times[job.job][1] for job in jobs if job.node == _job_node(node)]
    began = min((getattr(event, "began", None) or event.time for event in own), default=0.0)
    last = max((event.time for event in own), default=began)
    changes: dict[str, Any] = {"began": began, "ended": last}
    if node.ending == "unknown":
        if ends and ends[0] is not None:
            changes |= {"ended": max(last, ends[0].timestamp()), "ending": "killed"}
        else:
            changes |= {"ended": max(last, time.time()), "ending": "running"}
    return node.model_copy(update=changes)
