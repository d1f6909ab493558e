"""``azureml-elastic report``: what a run has done, from its folder or from Azure ML."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.submitted_run import open_run, open_run_table
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption
from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from azureml_elastic.ledger.events import Event
    from azureml_elastic.ledger.prices import Prices
    from azureml_elastic.ledger.summary import NodeSummary, Report
    from azureml_elastic.submit.submitted import NodeOfRun, SubmittedRun

__all__ = ["report"]


@explained(CONTINUES)
def report(
    run: Annotated[str, typer.Argument(help="Folder of a local run, or name of a submitted run.")],
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the timeline to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    prices: Annotated[
        Path | None, typer.Option(help="JSON file of prices per VM size and tier, for the cost of the nodes.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder for the events of a submitted run; by default runs/RUN.")
    ] = None,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Show the report of a run, also while it runs, and write it as JSON or as an HTML page if requested.

    That of a submitted run is made from its table and from the run history; its events are written to a folder.
    """
    from rich.console import Console

    from azureml_elastic.ledger.prices import load_prices
    from azureml_elastic.ledger.reading import read_events
    from azureml_elastic.ledger.summary import load_report
    from azureml_elastic.report.terminal import summary

    given = None if prices is None else load_prices(prices)
    folder = Path(run)
    if folder.is_dir() and to is None:
        loaded = load_report(folder)
        if given is not None:
            loaded = loaded.with_bill(read_events(loaded.paths.events), given)
    elif folder.name != run:
        raise UsageError(f"There is no folder {run}. Give the folder of a local run, or the name of a submitted one.")
    else:
        _, submitted, variables = open_run(run, subscription, group, workspace)
        loaded = _gather(submitted, variables, to or Path("runs") / submitted.name, given)
    if html is not None:
        from azureml_elastic.report.html import write_html

        write_html(loaded, html)
    if json is not None:
        json.write_text(loaded.model_dump_json(indent=2) + "\n", encoding="utf-8")
    Console().print(summary(loaded))
    for path in filter(None, (html, json)):
        typer.echo(f"Wrote {path}")


def _gather(submitted: SubmittedRun, variables: Mapping[str, str], folder: Path, prices: Prices | None) -> Report:
    """Return the report of a submitted run, and write its events and the report to a folder."""
    from azureml_elastic.ledger.node_names import NodeNames
    from azureml_elastic.ledger.summary import Paths, report_of_events
    from azureml_elastic.node.observation.event_rows import read_event_rows
    from azureml_elastic.submit.client import readable_errors

    with readable_errors(f"read the jobs of {submitted.name!r}"):
        jobs = submitted.nodes()
        times = {job.job: submitted.running_time(job.job) for job in jobs}
        machines = {job.node: submitted.machine(job) for job in jobs}
    with open_run_table(submitted, variables) as table:
        rows, skipped = read_event_rows(table)
    if not rows:
        raise UsageError(
            f"The table of {submitted.name} has no events: no node has started, or the rows were deleted. "
            f"'azureml-elastic status {submitted.name}' shows the jobs."
        )
    labels = {job.job: job.node for job in jobs}
    events = NodeNames(labels.get).apply(rows)
    paths = Paths.of(folder.absolute())
    _write(paths.events, events)
    made = report_of_events(paths, events, skipped=skipped)
    nodes = tuple(
        _with_times(node, events, jobs, times).model_copy(update=vars(machines[_job_node(node)])) for node in made.nodes
    )
    made = made.model_copy(update={"run_id": submitted.name, "nodes": nodes})
    made = made.with_timeline(events).with_bill(events, prices)
    made.write()
    return made


def _job_node(node: NodeSummary) -> str:
    """Return the name of a node's job: several nodes of one job are numbered."""
    return node.name.partition(".")[0]


def _write(folder: Path, events: Sequence[Event]) -> None:
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
