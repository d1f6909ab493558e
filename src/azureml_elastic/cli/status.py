"""``azureml-elastic status``: the round, the step and the nodes of a run, on this machine or submitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.run_argument import RunArgument, run_folder
from azureml_elastic.cli.submitted_run import open_run, read_state
from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from azureml_elastic.cli.run_reports import RunReport
    from azureml_elastic.node.observation.run_state import RunState
    from azureml_elastic.submit.run import NodeOfRun

__all__ = ["status"]


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
) -> None:
    """Show round, world size, step and last checkpoint of a run, and the state of each node."""
    if watch:
        from azureml_elastic.cli.watch import watch_run

        if not watch_run(run, live=live):
            raise typer.Exit(FAILED)
        return
    if live is not None:
        raise UsageError(f"{'--live' if live else '--plain'} needs --watch: the state is shown once without it.")
    folder = run_folder(run)
    if folder is not None:
        _show_folder(folder)
    else:
        _show_submitted(run)


def _show_folder(folder: Path) -> None:
    """Show a run on this machine by the files in its folder."""
    from azureml_elastic.cli.run_reports import LocalRunReports

    reports = LocalRunReports(folder)
    found = reports.read()
    state = "running" if found.running else found.report.outcome
    _show(f"{reports.name}: {state}", _lines_of_folder(found), _table_of_folder(found))


def _show_submitted(run: str) -> None:
    """Show a submitted run by its jobs and its table."""
    _, submitted, variables = open_run(run)
    nodes = submitted.nodes()
    state: RunState | None = None
    unknown = "No node has started yet."
    try:
        state = read_state(submitted, variables)
    except ElasticError as error:
        unknown = f"Round, step and checkpoints are unknown, as the run's table cannot be read: {error}"
    known = (unknown,) if state is None else (state.headline, state.progress, state.waits)
    lines = [submitted.first.studio_url, *known]
    _show(f"{submitted.name}: {submitted.status}", filter(None, lines), _table_of_jobs(nodes, state))


def _show(headline: str, lines: Iterable[str], table: Table) -> None:
    from rich.console import Console

    console = Console()
    console.print(headline, soft_wrap=True, highlight=False, markup=False)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(table)


def _lines_of_folder(found: RunReport) -> Iterable[str]:
    from azureml_elastic.ledger.events import CheckpointCommitted
    from azureml_elastic.plurals import counted

    report = found.report
    if report.message:
        yield report.message
    if found.running and report.rounds:
        last = report.rounds[-1]
        yield f"Round {last.number}: world size {last.world_size} on {counted(len(last.members), 'node')}"
    saved = max((event.step for event in found.events if isinstance(event, CheckpointCommitted)), default=None)
    parts = [f"step {report.last_step}"] if report.last_step else []
    parts.append("no checkpoint yet" if saved is None else f"checkpoint of step {saved}")
    yield ", ".join(parts)


def _table_of_folder(found: RunReport) -> Table:
    from rich.table import Table

    from azureml_elastic.local.view import Board
    from azureml_elastic.report.cells import ending_text

    board = Board()
    board.apply(found.events)
    # A node that was lost has not written that it left.
    endings = {name: "lost" for round_ in found.report.rounds for name in round_.lost if name not in board.members}
    ended = {node.name: ending_text(node.ending, node.exit_code) for node in found.report.nodes}
    endings |= {name: text for name, text in ended.items() if text}
    table = Table("node", "rank", "step", "state")
    for node in board.nodes.values():
        in_round = found.running and node.name in board.members
        state = endings.get(node.name) or node.state
        table.add_row(node.name, str(node.rank) if in_round else "", str(node.step) if node.step else "", state)
    return table


def _table_of_jobs(jobs: Sequence[NodeOfRun], state: RunState | None) -> Table:
    """Return the jobs with what their nodes do, and the nodes of jobs with several nodes below their job."""
    from rich.table import Table
    from rich.text import Text

    table = Table("node", "pool", "status", "in the run")
    table.add_column("job", overflow="fold")
    by_job: dict[str, list[str]] = {}
    for node in state.nodes if state is not None else ():
        text = node.state if node.rank is None else f"node rank {node.rank}"
        by_job.setdefault(node.job, []).append(f"{text}: {node.reason}" if node.reason else text)
    for job in jobs:
        # A node that was lost has not written that it left.
        alive = [text for text in by_job.get(job.job, ()) if job.active or text.startswith("left")]
        table.add_row(job.node, job.pool or "", job.status, Text("\n".join(alive)), job.job)
    return table
