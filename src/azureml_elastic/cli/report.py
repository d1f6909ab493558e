"""``azureml-elastic report``: what a run has done, from its folder or from Azure ML.

With ``--serve``, a page in a browser is updated while the run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from azureml_elastic.cli.failures import explained
from azureml_elastic.cli.output import JsonOption, console_beside, write_json
from azureml_elastic.cli.submitted_run import RunArgument, open_run, open_run_table, run_folder
from azureml_elastic.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from azureml_elastic.cli.workspace_jobs import Jobs
    from azureml_elastic.ledger.bill import Prices
    from azureml_elastic.ledger.events import Event
    from azureml_elastic.ledger.picture import Picture
    from azureml_elastic.ledger.summary import NodeSummary, Report
    from azureml_elastic.report.page_content import PageContent
    from azureml_elastic.submit.run import ElasticRun, NodeOfRun

_POLL_SECONDS = 2.0
_LOCAL_SECONDS = 1.0
_SERVICE_SECONDS = 5.0
"""Least time between two reads of a local run's files, or of the service."""

_SHARE = 4.0
"""Time between the end of one read and the next, as a multiple of the time of the first one."""


def _serve_page(reports: LocalRunReports | SubmittedRunReports, *, host: str, port: int) -> None:
    from azureml_elastic.local.page_server import PageServer

    local = isinstance(reports, LocalRunReports)
    page = LivePage(reports, _LOCAL_SECONDS if local else _SERVICE_SECONDS)
    with PageServer(page, host=host, port=port) as server:
        typer.echo(f"Report of {reports.name}: {server.url}")
        if server.token is not None:
            typer.echo("The URL is all that is needed to read the page, and the connection is not encrypted.", err=True)
        threading.Event().wait()


class LivePage:
    """The page of a run at the moment, made anew when it is requested and not too often.

    Args:
        least_seconds: least time between two reads of the reports' source.
    """

    def __init__(
        self,
        reports: LocalRunReports | SubmittedRunReports,
        least_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reports = reports
        self._least_seconds = least_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._due = clock()
        self._content: PageContent | None = None
        self._page = b""
        self._final = False

    def __call__(self) -> bytes:
        """Return the page."""
        # Each request has a thread of its own: the first one reads the source, and the others wait for its page.
        with self._lock:
            if not self._final and self._clock() >= self._due:
                began = self._clock()
                self._page = self._made().encode()
                now = self._clock()
                self._due = now + max(self._least_seconds, _SHARE * (now - began))
            return self._page

    def _made(self) -> str:
        from azureml_elastic.report.page import message_page, run_page
        from azureml_elastic.report.page_content import page_content

        try:
            found = self._reports.read()
        except ElasticError as error:
            if self._content is None:
                return message_page(self._reports.name, str(error), poll_seconds=_POLL_SECONDS)
            notice = f"This is the last known state: {error}"
            return run_page(self._content, notice=notice, poll_seconds=_POLL_SECONDS)
        self._content = page_content(found.report, found.picture, running=found.running)
        self._final = not found.running
        return run_page(self._content, poll_seconds=_POLL_SECONDS if found.running else None)


@explained("Interrupted; a run that goes on is not ended by it.")
def report(
    run: RunArgument,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a self-contained HTML page to this file.")
    ] = None,
    json: JsonOption = None,
    prices: Annotated[
        Path | None, typer.Option(help="JSON file of prices per VM size and tier, for the cost of the nodes.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page, which updates itself until the run ends. Ctrl-C ends it.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="With --serve: port; by default a free one.", min=0, max=65535)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="With --serve: address to listen on, by default 127.0.0.1. Any but the loopback requires a token, "
            "which the URL has."
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder for the events of a submitted run; by default runs/RUN.")
    ] = None,
) -> None:
    """Show the report of a run, also while it runs, and write it as JSON or as an HTML page if requested.

    That of a submitted run is made from its table and from the run history; its events are written to a folder.
    """
    if serve:
        _refuse(
            "--serve shows the report in a browser and writes no files", {"--html": html, "--json": json, "--to": to}
        )
        _serve_page(open_reports(run, None, prices), host=host or "127.0.0.1", port=port or 0)
        return
    _refuse("Only --serve listens", {"--port": port, "--host": host})
    from azureml_elastic.report.terminal import summary

    reports = open_reports(run, to, prices)
    found = reports.read()
    if isinstance(reports, SubmittedRunReports):
        reports.write(found)
    console = console_beside(json)
    console.print(summary(found.report))
    if html is not None:
        from azureml_elastic.report.page import write_page

        write_page(found.report, found.picture, html, running=found.running)
        console.print(f"Wrote {html}", soft_wrap=True, highlight=False, markup=False)
    write_json(found.report, json)


def _refuse(why: str, options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"{why}. Leave {' and '.join(given)} out.")


_QUIET_SECONDS = 30.0
"""Time without an event after which a run that has ended without a report gets none."""


@dataclass(frozen=True)
class RunReport:
    """Report of a run at a moment, the picture of it, and whether it goes on."""

    report: Report
    picture: Picture
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
        from azureml_elastic.ledger.picture import Picture
        from azureml_elastic.ledger.reading import EventReader
        from azureml_elastic.ledger.summary import Paths

        self.name = folder.absolute().name
        self._folder = folder
        self._prices = prices
        self._paths = Paths.of(folder.absolute())
        self._reader = EventReader(self._paths.events)
        self._picture = Picture()

    def read(self) -> RunReport:
        """Return the report that the launcher has written, otherwise one of the events so far.

        Raises:
            UsageError: the folder has neither of them.
        """
        from azureml_elastic.ledger.summary import load_report, report_of

        written = self._paths.report.is_file()  # before the events, so that none is missed
        self._picture.apply(self._reader.read())
        if written or not self._picture.nodes:
            report = load_report(self._folder)
        else:
            report = report_of(self._paths, self._picture, skipped=self._reader.skipped)
        if self._prices is not None:
            report = report.with_bill(self._picture, self._prices)
        return RunReport(report, self._picture, running=not written and not self._is_over(report))

    def _is_over(self, report: Report) -> bool:
        """Return whether a run that was not launched here, or whose launcher was killed, has ended."""
        return report.outcome != "unfinished" and time.time() - self._picture.latest > _QUIET_SECONDS


class SubmittedRunReports:
    """Reports of a submitted run, from its table and the run history.

    Args:
        variables: environment variables that identify the workspace.
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
        self._events: list[Event] = []

    def read(self) -> RunReport:
        """Return the report of what the table and the run history have now.

        Raises:
            ElasticError: they cannot be read, or no node has started.
        """
        from azureml_elastic.ledger.picture import Picture
        from azureml_elastic.ledger.reading import NodeNames
        from azureml_elastic.ledger.summary import report_of
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
        self._events = NodeNames(labels.get).apply(rows)
        picture = Picture.of(self._events)
        made = report_of(self._paths, picture, skipped=skipped)
        nodes = tuple(
            _with_times(node, picture, jobs, times).model_copy(update=vars(machines[_job_node(node)]))
            for node in made.nodes
        )
        made = made.model_copy(update={"name": submitted.name, "nodes": nodes})
        made = made.with_timeline(picture).with_bill(picture, self._prices)
        return RunReport(made, picture, running=any(job.active for job in jobs))

    def write(self, found: RunReport) -> None:
        """Write the events and the report to the run's folder.

        Raises:
            UsageError: the folder cannot be written.
        """
        _write_events(self._paths.events, self._events)
        found.report.write()


def _job_node(node: NodeSummary) -> str:
    return node.name.partition(".")[0]


def _write_events(folder: Path, events: Sequence[Event]) -> None:
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
    picture: Picture,
    jobs: Sequence[NodeOfRun],
    times: Mapping[str, tuple[datetime | None, datetime | None]],
) -> NodeSummary:
    """Return the node with its lifetime, whose end only the run history knows if the node was lost."""
    own = picture.nodes[node.name].time
    ends = [times[job.job][1] for job in jobs if job.node == _job_node(node)]
    last = own.ended
    changes: dict[str, Any] = {"began": own.began, "ended": last}
    if node.ending == "unknown":
        if ends and ends[0] is not None:
            changes |= {"ended": max(last, ends[0].timestamp()), "ending": "killed"}
        else:
            changes |= {"ended": max(last, time.time()), "ending": "running"}
    return node.model_copy(update=changes)
