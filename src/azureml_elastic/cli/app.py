"""Root of the command line, with its commands and common options."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from azureml_elastic.cli.checkpoints import checkpoints
from azureml_elastic.cli.dashboard import dashboard
from azureml_elastic.cli.doctor import doctor
from azureml_elastic.cli.init import init
from azureml_elastic.cli.jobs import compile_, schema, submit
from azureml_elastic.cli.local import demo, local
from azureml_elastic.cli.logs import logs
from azureml_elastic.cli.replace_nodes import replace_nodes
from azureml_elastic.cli.report import report
from azureml_elastic.cli.runs import cancel, download
from azureml_elastic.cli.simulate import simulate
from azureml_elastic.cli.status import status
from azureml_elastic.cli.watch import watch
from azureml_elastic.cli.workspace import workspace
from azureml_elastic.output_encoding import accept_all_characters

__all__ = ["app", "main"]

app = typer.Typer(
    name="azureml-elastic",
    help="Elastic, preemption-proof distributed PyTorch jobs on Azure Machine Learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# Options end where the program begins; everything after it is the program's.
app.command(context_settings={"allow_interspersed_args": False})(local)
app.command(name="compile")(compile_)
for command in (
    demo, report, simulate, doctor, init, schema,
    submit, status, watch, dashboard, logs, cancel, download, replace_nodes,
):  # fmt: skip
    app.command()(command)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(workspace, name="workspace")


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
    accept_all_characters()
    app()
