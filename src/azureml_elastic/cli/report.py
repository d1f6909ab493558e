"""``azureml-elastic report``: what a run has done, from its folder or from Azure ML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.run_argument import RunArgument
from azureml_elastic.cli.run_reports import SubmittedRunReports, open_reports
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption

__all__ = ["report"]


@explained(CONTINUES)
def report(
    run: RunArgument,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a self-contained HTML page to this file.")
    ] = None,
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

    from azureml_elastic.report.terminal import summary

    reports = open_reports(run, to, prices, subscription, group, workspace)
    found = reports.read()
    loaded = found.report
    if isinstance(reports, SubmittedRunReports):
        reports.write(found)
    if html is not None:
        from azureml_elastic.report.page import write_page

        write_page(loaded, found.events, html, running=found.running)
    if json is not None:
        json.write_text(loaded.model_dump_json(indent=2) + "\n", encoding="utf-8")
    Console().print(summary(loaded))
    for path in filter(None, (html, json)):
        typer.echo(f"Wrote {path}")
