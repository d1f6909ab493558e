"""The command line's root: its commands and what they have in common."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from azureml_elastic.cli.checkpoints import checkpoints
from azureml_elastic.cli.demo import demo
from azureml_elastic.cli.local import local
from azureml_elastic.cli.report import report

__all__ = ["app", "main"]

app = typer.Typer(
    name="azureml-elastic",
    help="Elastic, preemption-proof distributed PyTorch jobs on Azure Machine Learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# Options end where the program begins; everything after it is the program's.
app.command(context_settings={"allow_interspersed_args": False})(local)
app.command()(demo)
app.command()(report)
app.add_typer(checkpoints, name="checkpoints")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"azureml-elastic {metadata.version('azureml-elastic')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Elastic, preemption-proof distributed PyTorch jobs on Azure Machine Learning."""


def main() -> None:
    """Run the command line."""
    app()
