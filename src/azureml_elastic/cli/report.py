"""``azureml-elastic report``: shows the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import explained

__all__ = ["report"]


def report(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder.")],
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the timeline to this file.")] = None,
) -> None:
    """Show the summary of a run, and write it as an HTML page if asked."""
    with explained():
        from rich.console import Console

        from azureml_elastic.ledger.summary import load_report
        from azureml_elastic.report.terminal import summary

        loaded = load_report(run_dir)
        if html is not None:
            from azureml_elastic.report.html import write_html

            write_html(loaded, html)
        Console().print(summary(loaded))
        if html is not None:
            typer.echo(f"Wrote {html}")
