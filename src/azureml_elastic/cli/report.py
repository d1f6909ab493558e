"""``azureml-elastic report``: what a run has done, from its folder or from Azure ML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import explained
from azureml_elastic.cli.run_argument import RunArgument
from azureml_elastic.cli.run_reports import SubmittedRunReports, open_reports
from azureml_elastic.errors import UsageError

__all__ = ["report"]


@explained("Interrupted; a run that goes on is not ended by it.")
def report(
    run: RunArgument,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a self-contained HTML page to this file.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
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
        from azureml_elastic.cli.live_page import serve as serve_page

        serve_page(open_reports(run, None, prices), host=host or "127.0.0.1", port=port or 0)
        return
    _refuse("Only --serve listens", {"--port": port, "--host": host})
    from rich.console import Console

    from azureml_elastic.report.terminal import summary

    reports = open_reports(run, to, prices)
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


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Refuse options that have no effect."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"{why}. Leave {' and '.join(given)} out.")
