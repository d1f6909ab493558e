"""``azureml-elastic download``: the outputs and logs of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import GOES_ON, explained
from azureml_elastic.cli.runs import NodeOption, RunName, open_run
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption

__all__ = ["download"]


def download(
    run: RunName,
    to: Annotated[Path, typer.Option("--to", help="The folder to write to.")] = Path(),
    output: Annotated[
        str | None, typer.Option("--output", help="One output by its name; by default all, and the logs.")
    ] = None,
    node: NodeOption = None,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Download what a node has written; an output with a path of its own is the same for all nodes."""
    with explained(GOES_ON):
        client, submitted = open_run(run, subscription, group, workspace)

        from azureml_elastic.submit.client import readable_errors

        with readable_errors(f"list the nodes of {run!r}"):
            chosen = submitted.node(node)
        with readable_errors(f"download what {chosen.node} has written"):
            to.mkdir(parents=True, exist_ok=True)
            if output is None:
                client.jobs.download(chosen.job, download_path=to, all=True)
            else:
                client.jobs.download(chosen.job, download_path=to, output_name=output)
        typer.echo(f"{chosen.node} ({chosen.job}) is in {to.absolute()}")
