"""``azureml-elastic cancel``: ends a run with all its nodes."""

from __future__ import annotations

import typer

from azureml_elastic.cli.failures import GOES_ON, explained
from azureml_elastic.cli.status import RunName
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption, find_workspace

__all__ = ["cancel"]


def cancel(
    run: RunName,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Cancel a run: its job, and the jobs that brought it nodes later."""
    with explained(GOES_ON):
        place = find_workspace(subscription, group, workspace)

        from azureml_elastic.submit.client import connect, said_plainly
        from azureml_elastic.submit.submitted import SubmittedRun

        asked: list[str] = []

        def tell(name: str) -> None:
            asked.append(name)
            typer.echo(f"cancelling {name}")

        with said_plainly(f"cancel the run {run!r}"):
            SubmittedRun(connect(place.subscription, place.group, place.name), run).cancel(tell)
        if not asked:
            typer.echo(f"{run} has ended already.")
