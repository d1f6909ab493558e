"""Commands about the jobs of a submitted run: ``download``, ``cancel`` and ``replace-nodes``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import CONTINUES, explained, require
from azureml_elastic.cli.submitted_run import RunName, open_client_run
from azureml_elastic.cli.workspaces import current_workspace
from azureml_elastic.config.base import positive_duration
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError, RunFailed, UsageError

if TYPE_CHECKING:
    from azureml_elastic.node.replacement.replacer import NodeReplacer, ReplacementStatus

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


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 86400.0


@explained(CONTINUES)
def replace_nodes(
    run: RunName,
    interval: Annotated[
        str | None,
        typer.Option(help="Time between two checks, as in 30s; by default as the job says.", metavar="DURATION"),
    ] = None,
    max_replacements: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of node jobs to submit; by default as the job says.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.01, help="Cost in USD from which no node is submitted; by default as the job says."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Check once, submit what is missing, and exit.")] = False,
) -> None:
    """Replace the lost nodes of a run until it ends, with your own login; see docs/how-to/nodes.md."""
    pause = None if interval is None else _pause(interval)
    variables = current_workspace().variables
    require(("azure.data.tables", "azure-data-tables", "node"), ("azure.identity", "azure-identity", "node"))

    from azureml_elastic.node.replacement.replacer import open_replacer

    given = {"max_replacements": max_replacements, "budget": budget}
    changes = {name: value for name, value in given.items() if value is not None}
    with open_replacer(NodeEnvironment.read().with_variables(variables), run, changes) as (replacer, policy):
        printed = ""
        pause = pause or policy.interval.total_seconds()
        while True:
            status = _act(replacer, keep_trying=not once)
            if status is not None:
                printed = _print(status, printed)
                if status.over or status.hopeless:
                    break
            if once:
                return
            time.sleep(pause)
    if status.hopeless:
        raise RunFailed(f"The run has no node left, and none may be submitted. {status.limit}")
    if not status.succeeded:
        raise RunFailed(status.message)


def _pause(interval: str) -> float:
    seconds = positive_duration("--interval", interval).total_seconds()
    if not _SHORTEST_PAUSE <= seconds <= _LONGEST_PAUSE:
        raise UsageError(
            f"--interval={interval!r} is not between {_SHORTEST_PAUSE:g} s and a day. Give for example 30s."
        )
    return seconds


def _act(replacer: NodeReplacer, *, keep_trying: bool) -> ReplacementStatus | None:
    try:
        return replacer.act()
    except UsageError:  # a missing role or a wrong name does not pass by itself
        raise
    except ElasticError as error:
        if not keep_trying:
            raise
        typer.echo(f"azureml-elastic: {error} Trying again.", err=True)
        return None


def _print(status: ReplacementStatus, printed: str) -> str:
    text = _state(status)
    if text != printed:
        typer.echo(text)
    for action in status.done:
        typer.echo(f"  {action}")
    return text


def _state(status: ReplacementStatus) -> str:
    counts: dict[str, list[int]] = {}
    for job in status.jobs:
        if job.submitted:
            of_pool = counts.setdefault(status.pools[job.pool].compute, [0, 0])
            of_pool[0] += job.state == "running"
            of_pool[1] += job.state == "waiting"
    nodes = ", ".join(f"{pool}: {running} run, {waiting} wait" for pool, (running, waiting) in counts.items())
    limit = f" {status.limit}" if status.limit and not status.over else ""
    return f"{status.message} {nodes}.{limit}"
