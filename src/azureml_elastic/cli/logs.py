"""``azureml-elastic logs``: streams the log of a node."""

from __future__ import annotations

import typer

from azureml_elastic.cli.failures import GOES_ON, explained
from azureml_elastic.cli.runs import NodeOption, RunName, open_run
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption

__all__ = ["logs"]


def logs(
    run: RunName,
    node: NodeOption = None,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Show the log of one node until its job ends."""
    with explained(GOES_ON):
        client, submitted = open_run(run, subscription, group, workspace)

        from azureml_elastic.submit.client import readable_errors

        with readable_errors(f"list the nodes of {run!r}"):
            chosen = submitted.node(node)
        typer.echo(f"azureml-elastic: {chosen.node}, {chosen.status} ({chosen.job})", err=True)
        with readable_errors(f"stream the log of {chosen.node}"):
            client.jobs.stream(chosen.job)
