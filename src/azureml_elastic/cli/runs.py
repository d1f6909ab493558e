"""Commands about the jobs of a submitted run: ``download`` and ``cancel``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.submitted_run import RunName, open_client_run

NodeOption = Annotated[
    str | None,
    typer.Option("--node", help="Node such as node_0 or spot_1, see 'status'; by default one that runs or has run."),
]


@explained(CONTINUES)
def download(
    run: RunName,
    to: Annotated[Path, typer.Option("--to", help="The folder to write to.")] = Path(),
    output: Annotated[
        str | None, typer.Option("--output", help="Name of one output; by default all outputs and the logs.")
    ] = None,
    node: NodeOption = None,
) -> None:
    """Download the outputs and logs of a node; an output with a path of its own is the same for all nodes."""
    from azureml_elastic.submit.client import readable_errors

    client, submitted = open_client_run(run)
    with readable_errors(f"list the nodes of {submitted.name!r}"):
        chosen = submitted.node(node)
    wanted = {"all": True} if output is None else {"output_name": output}
    with readable_errors(f"download the outputs of {chosen.node}"):
        to.mkdir(parents=True, exist_ok=True)
        client.jobs.download(chosen.job, download_path=to, **wanted)
    typer.echo(f"{chosen.node} ({chosen.job}) is in {to.absolute()}")


@explained(CONTINUES)
def cancel(run: RunName) -> None:
    """Cancel a run: its job, and the jobs of replacement nodes."""
    from azureml_elastic.submit.client import readable_errors

    _, submitted = open_client_run(run)
    cancelled: list[str] = []

    def report(name: str) -> None:
        cancelled.append(name)
        typer.echo(f"cancelling {name}")

    with readable_errors(f"cancel the run {run!r}"):
        submitted.cancel(report)
    if not cancelled:
        typer.echo(f"{run} has ended already.")
