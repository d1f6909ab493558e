"""``azureml-elastic status``: shows the status of a run and of its nodes."""

from __future__ import annotations

from azureml_elastic.cli.failures import GOES_ON, explained
from azureml_elastic.cli.runs import RunName, open_run
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption

__all__ = ["status"]


def status(
    run: RunName,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Show the status of a run and of its nodes, including replacement nodes."""
    with explained(GOES_ON):
        _, submitted = open_run(run, subscription, group, workspace)

        from rich.console import Console
        from rich.table import Table

        from azureml_elastic.submit.client import readable_errors

        with readable_errors(f"list the nodes of {run!r}"):
            nodes = submitted.nodes()
        console = Console()
        console.print(f"{submitted.name}: {submitted.status}", highlight=False)
        if submitted.job.studio_url:
            console.print(submitted.job.studio_url, soft_wrap=True, highlight=False)
        table = Table("node", "pool", "status")
        table.add_column("job", overflow="fold")
        for node in nodes:
            table.add_row(node.node, node.pool or "", node.status, node.job)
        console.print(table)
