"""``azureml-elastic cancel``: ends a run with all its nodes."""

from __future__ import annotations

import typer

from azureml_elastic.cli.failures import GOES_ON, explained
from azureml_elastic.cli.runs import RunName, open_run
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption

__all__ = ["cancel"]


def cancel(
    run: RunName,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Cancel a run: its job, and the jobs of replacement nodes."""
    with explained(GOES_ON):
        _, submitted = open_run(run, subscription, group, workspace)

        from azureml_elastic.submit.client import readable_errors

        asked: list[str] = []

        def report(name: str) -> None:
            asked.append(name)
            typer.echo(f"cancelling {name}")

        with readable_errors(f"cancel the run {run!r}"):
            submitted.cancel(report)
        if not asked:
            typer.echo(f"{run} has ended already.")
