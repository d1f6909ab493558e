"""Root of the command line, with its commands and common options."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from azureml_elastic.cli.checkpoints import checkpoints
from azureml_elastic.cli.doctor import doctor
from azureml_elastic.cli.init import init
from azureml_elastic.cli.jobs import compile_, schema, submit, validate
from azureml_elastic.cli.local import demo, local
from azureml_elastic.cli.logs import logs
from azureml_elastic.cli.output import CommandWithJson
from azureml_elastic.cli.report import report
from azureml_elastic.cli.runs import cancel, download, replace_nodes
from azureml_elastic.cli.simulate import simulate
from azureml_elastic.cli.status import status
from azureml_elastic.cli.workspace import workspace
from azureml_elastic.cli.workspaces import WORKSPACE_OPTIONS, WorkspaceOptions, set_options
from azureml_elastic.output_encoding import accept_all_characters
from azureml_elastic.submit.client import silence_sdk_logs


class _Root(TyperGroup):
    """The root command, which says where its own options belong."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; explain an option of the workspace that follows it."""
        try:
            return super().invoke(ctx)
        except Exception as error:  # newer releases of typer have a click of their own, and its errors
            name = getattr(error, "option_name", None)
            if name in WORKSPACE_OPTIONS and hasattr(error, "message"):
                where = f"azureml-elastic {name} ... {ctx.invoked_subcommand}"
                error.message = f"{name} belongs before the command: {where}"
            raise


app = typer.Typer(
    name="azureml-elastic",
    cls=_Root,
    help="Elastic, preemption-proof distributed PyTorch jobs on Azure Machine Learning.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
# Options end where the program begins; everything after it is the program's.
app.command(context_settings={"allow_interspersed_args": False})(local)
app.command(name="compile")(compile_)
for command in (demo, init, schema, submit, logs, cancel, download, replace_nodes):
    app.command()(command)
for with_json in (report, simulate, doctor, status, validate):
    app.command(cls=CommandWithJson)(with_json)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(workspace, name="workspace")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"azureml-elastic {metadata.version('azureml-elastic')}")
        raise typer.Exit


@app.callback()
def _root(
    subscription: Annotated[
        str | None, typer.Option("--subscription", help="Id of the workspace's subscription; else from config.json.")
    ] = None,
    resource_group: Annotated[
        str | None, typer.Option("--resource-group", "-g", help="Its resource group; else from config.json.")
    ] = None,
    workspace_name: Annotated[
        str | None, typer.Option("--workspace-name", "-w", help="Name of the workspace; else from config.json.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Elastic, preemption-proof distributed PyTorch jobs on Azure Machine Learning.

    The workspace of a command is that of the options below, of Azure ML's environment variables, of config.json, or the
    default one of az.
    """
    del version  # which its callback has shown
    silence_sdk_logs()
    set_options(WorkspaceOptions(subscription, resource_group, workspace_name))


def main() -> None:
    """Run the command line."""
    accept_all_characters()
    app()
