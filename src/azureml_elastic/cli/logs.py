"""``azureml-elastic logs``: what a node has written, while it writes it."""

from __future__ import annotations

from typing import Annotated

import typer

from azureml_elastic.cli.failures import GOES_ON, explained
from azureml_elastic.cli.status import RunName
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption, find_workspace

__all__ = ["NodeOption", "logs"]

NodeOption = Annotated[
    str | None,
    typer.Option("--node", help="Such as node_0 or spot_1, see 'status'; by default one that runs or has run."),
]


def logs(
    run: RunName,
    node: NodeOption = None,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Show the log of one node until its job ends."""
    with explained(GOES_ON):
        place = find_workspace(subscription, group, workspace)

        from azureml_elastic.submit.client import connect, said_plainly
        from azureml_elastic.submit.submitted import SubmittedRun

        client = connect(place.subscription, place.group, place.name)
        with said_plainly(f"give the run {run!r}"):
            chosen = SubmittedRun(client, run).node(node)
        typer.echo(f"azureml-elastic: {chosen.node}, {chosen.status} ({chosen.job})", err=True)
        with said_plainly(f"stream the log of {chosen.node}"):
            client.jobs.stream(chosen.job)
