"""``azureml-elastic status``: the round, the step and the nodes of a run, on this machine or submitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.output import JsonOption, console_beside, write_json
from azureml_elastic.cli.submitted_run import RunArgument, open_run, open_run_table, read_state, run_folder
from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.errors import ElasticError, TableError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from azureml_elastic.ledger.events import Event
    from azureml_elastic.ledger.picture import Moment
    from azureml_elastic.ledger.reading import LineReader
    from azureml_elastic.local.view import View
    from azureml_elastic.node import table as tables
    from azureml_elastic.submit.run import ElasticRun, NodeOfRun

_FOLDER_SECONDS = 0.2
_TABLE_SECONDS = 2.0
_JOBS_SECONDS = 10.0


def watch_run(run: str, *, live: bool | None) -> bool:
    """Show the nodes, rounds, steps and checkpoints of a run until it ends; return whether it succeeded."""
    from rich.console import Console

    from azureml_elastic.local.view import choose_view

    view = choose_view(Console(), live=live)
    folder = run_folder(run)
    if folder is not None:
        return _watch_shown(_LocalRun(folder), view, _FOLDER_SECONDS)
    _, submitted, variables = open_run(run)
    with open_run_table(submitted, variables) as table:
        return _watch_shown(_SubmittedRun(submitted, table, view.note), view, _TABLE_SECONDS)


def _watch_shown(run: _LocalRun | _SubmittedRun, view: View, interval: float) -> bool:
    from azureml_elastic.ledger.picture import Picture

    picture = Picture()
    with view:
        while True:
            end = run.end()  # before the read, so that no event in between is missed
            events = run.read()
            for name, state in run.expected().items():
                picture.expect(name, state)
            picture.apply(events)
            for node, lines in run.output().items():
                view.output(node, lines)
            view.events(picture.now, events)
            if picture.ended is not None:
                return picture.ended.succeeded
            if end is not None:
                view.note(end)
                return False
            time.sleep(interval)


class _LocalRun:
    def __init__(self, folder: Path) -> None:
        from azureml_elastic.ledger.reading import EventReader
        from azureml_elastic.ledger.summary import Paths

        self._paths = Paths.of(folder)
        if not self._paths.events.is_dir():
            raise UsageError(
                f"{folder} contains no events of a run. Give the folder that 'azureml-elastic local' has printed, for "
                "example one below ./runs."
            )
        self._reader = EventReader(self._paths.events)
        self._logs: dict[Path, LineReader] = {}

    def read(self) -> list[Event]:
        return sorted(self._reader.read(), key=lambda event: event.time)  # one machine, one clock

    def expected(self) -> Mapping[str, str]:
        return {}

    def output(self) -> Mapping[str, Sequence[str]]:
        from azureml_elastic.ledger.reading import LineReader

        found = {}
        over = self._paths.report.is_file()  # the report is written last
        for path in sorted(self._paths.logs.glob("*.log")):
            lines = self._logs.setdefault(path, LineReader(path)).read(last=over)
            if lines:
                found[path.stem] = [line.decode("utf-8", "replace") for line in lines]
        return found

    def end(self) -> str | None:
        """Return why no further event comes although the run has not recorded its end, ``None`` if some may come."""
        return f"the run has ended, see {self._paths.report}" if self._paths.report.is_file() else None


class _SubmittedRun:
    def __init__(self, submitted: ElasticRun, table: tables.Table, note: Callable[[str], object]) -> None:
        from azureml_elastic.ledger.reading import NodeNames
        from azureml_elastic.node.records.observation import EventRowReader

        self._submitted = submitted
        self._reader = EventRowReader(table)
        self._names = NodeNames(self._label)
        self._note = note
        self._problem = ""
        self._jobs_at = -_JOBS_SECONDS
        self._nodes: dict[str, NodeOfRun] = {}
        self._active = True

    def read(self) -> list[Event]:
        try:
            events = self._reader.read()
        except TableError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._note(f"the table cannot be read, trying again: {error}")
            return []
        return self._names.apply(events)

    def expected(self) -> Mapping[str, str]:
        """Return the states of the nodes by their jobs."""
        from azureml_elastic.local.view import state_of_job

        return {job.node: state_of_job(job.status) for job in self._nodes.values()}

    def output(self) -> Mapping[str, Sequence[str]]:
        return {}  # that is what 'logs' is for

    def end(self) -> str | None:
        if time.monotonic() - self._jobs_at >= _JOBS_SECONDS:
            self._read_jobs()
        return None if self._active else f"all jobs of {self._submitted.name} have ended"

    def _label(self, job: str) -> str | None:
        if job not in self._nodes:
            self._read_jobs()  # that of a node that has come since
        return self._nodes[job].node if job in self._nodes else None

    def _read_jobs(self) -> None:
        jobs = self._submitted.nodes()
        self._jobs_at = time.monotonic()
        self._nodes = {job.job: job for job in jobs}
        # A pipeline without children has yet to start them.
        self._active = not jobs or any(job.active for job in jobs)


@explained(CONTINUES)
def status(
    run: RunArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run live until it ends; exits with 0 if it succeeds.")
    ] = False,
    live: Annotated[
        bool | None,
        typer.Option("--live/--plain", help="With --watch: a live table, or lines; by default as the terminal allows."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Show round, world size, step and last checkpoint of a run, and the state of each node."""
    if watch:
        if json is not None:
            raise UsageError("--json shows the state once, and --watch shows it until the end. Leave one of them out.")
        if not watch_run(run, live=live):
            raise typer.Exit(FAILED)
        return
    if live is not None:
        raise UsageError(f"{'--live' if live else '--plain'} needs --watch: the state is shown once without it.")
    folder = run_folder(run)
    lines, document = _submitted(run) if folder is None else _local(folder)
    console = console_beside(json)
    for line in (f"{document['name']}: {document['status']}", *filter(None, lines)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(_table(document["nodes"]))
    write_json({"version": 1, **document}, json)


def _local(folder: Path) -> tuple[Iterable[str], dict[str, Any]]:
    from azureml_elastic.cli.report import LocalRunReports
    from azureml_elastic.report.cells import ending_text

    found = LocalRunReports(folder).read()
    report, now = found.report, found.picture.now
    ended = {node.name: ending_text(node.ending, node.exit_code) for node in report.nodes}
    nodes = [
        {
            "node": node.name,
            "rank": node.rank if found.running and node.name in now.members else None,
            "step": node.step or None,
            "state": ended.get(node.name) or node.state,
        }
        for node in now.nodes
    ]
    document = {
        "name": report.name,
        "status": "running" if found.running else report.outcome,
        "message": report.message,
        **_progress_of(now if found.picture.sealed else None),
        "nodes": nodes,
    }
    return (report.message, now.headline if found.running else "", now.progress), document


def _submitted(run: str) -> tuple[Iterable[str], dict[str, Any]]:
    _, submitted, variables = open_run(run)
    jobs = submitted.nodes()
    state: Moment | None = None
    message = "No node has started yet."
    try:
        state = read_state(submitted, variables)
    except ElasticError as error:
        message = f"Round, step and checkpoints are unknown, as the run's table cannot be read: {error}"
    lines = (message,) if state is None else (state.headline, state.progress, state.waits)
    document = {
        "name": submitted.name,
        "status": submitted.status,
        "message": message if state is None else state.message,
        "studio_url": submitted.first.studio_url,
        **_progress_of(state),
        "nodes": list(_jobs(jobs, state)),
    }
    return (submitted.first.studio_url or "", *lines), document


def _progress_of(state: Moment | None) -> dict[str, Any]:
    """Return how far a run is; ``None`` for each value that is unknown."""
    names = ("round", "world_size", "step", "checkpoint_step")
    return {name: None if state is None else getattr(state, name) for name in names}


def _jobs(jobs: Sequence[NodeOfRun], state: Moment | None) -> Iterable[dict[str, Any]]:
    """Yield the jobs with what their nodes do: several nodes of one job are in one row."""
    by_job: dict[str, list[str]] = {}
    for node in state.nodes if state is not None else ():
        text = node.state if node.rank is None else f"node rank {node.rank}"
        by_job.setdefault(node.job, []).append(f"{text}: {node.reason}" if node.reason else text)
    for job in jobs:
        # A node that was lost has not written that it left.
        alive = [text for text in by_job.get(job.job, ()) if job.active or text.startswith("left")]
        yield {"node": job.node, "pool": job.pool, "status": job.status, "in_the_run": "\n".join(alive), "job": job.job}


def _table(rows: Sequence[Mapping[str, object]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in rows[0] if rows else ("node",):
        table.add_column(heading.replace("_", " "), overflow="fold" if heading == "job" else "ellipsis")
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row.values()))
    return table
