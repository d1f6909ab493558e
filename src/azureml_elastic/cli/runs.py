"""What the commands about a submitted run have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from azureml_elastic.cli.workspaces import find_workspace

if TYPE_CHECKING:
    from azureml_elastic.submit.submitted import SubmittedRun

__all__ = ["NodeOption", "RunName", "open_run"]

RunName = Annotated[str, typer.Argument(help="The name of the job that submitting returned.")]

NodeOption = Annotated[
    str | None,
    typer.Option("--node", help="Such as node_0 or spot_1, see 'status'; by default one that runs or has run."),
]


def open_run(run: str, subscription: str | None, group: str | None, workspace: str | None) -> tuple[Any, SubmittedRun]:
    """Return the client of the workspace, and the run.

    Args:
        run: name of its job.
        subscription: from the command line, as the next two.
        group: the resource group.
        workspace: its name.

    Raises:
        UsageError: nothing names the workspace.
        SubmitError: there is no such job, or it is no elastic one.
        MissingExtra: azure-ai-ml is not installed.
    """
    place = find_workspace(subscription, group, workspace)

    from azureml_elastic.submit.client import connect, readable_errors
    from azureml_elastic.submit.submitted import SubmittedRun

    client = connect(place.subscription, place.group, place.name)
    with readable_errors(f"give the run {run!r}"):
        return client, SubmittedRun(client, run)
