"""Options and functions shared by the commands about a submitted run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from azureml_elastic.cli.workspaces import find_workspace

if TYPE_CHECKING:
    from azureml_elastic.submit.submitted import SubmittedRun

__all__ = ["NodeOption", "RunName", "open_run"]

RunName = Annotated[str, typer.Argument(help="Name of the run, as printed by 'submit'.")]

NodeOption = Annotated[
    str | None,
    typer.Option("--node", help="Node such as node_0 or spot_1, see 'status'; by default one that runs or has run."),
]


def open_run(run: str, subscription: str | None, group: str | None, workspace: str | None) -> tuple[Any, SubmittedRun]:
    """Return the client of the workspace, and the run.

    Args:
        run: name of the run's job.
        subscription: id of the subscription; ``None`` searches it, as the next two, with ``find_workspace``.
        group: name of the resource group.
        workspace: name of the workspace.

    Raises:
        UsageError: the workspace is not specified.
        SubmitError: the job does not exist or is not elastic.
        MissingExtra: azure-ai-ml is not installed.
    """
    place = find_workspace(subscription, group, workspace)

    from azureml_elastic.submit.client import connect, readable_errors
    from azureml_elastic.submit.submitted import SubmittedRun

    client = connect(place.subscription, place.group, place.name)
    with readable_errors(f"read the run {run!r}"):
        return client, SubmittedRun(client, run)
