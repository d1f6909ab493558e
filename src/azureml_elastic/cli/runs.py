"""Commands about the jobs of a submitted run: ``logs``, ``download`` and ``cancel``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.submitted_run import RunName, open_run, read_state
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption
from azureml_elastic.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from azureml_elastic.submit.submitted import NodeOfRun, SubmittedRun

__all__ = ["cancel", "download", "logs"]

NodeOption = Annotated[
    str | None,
    typer.Option("--node", help="Node such as node_0 or spot_1, see 'status'; by default one that runs or has run."),
]


@explained(CONTINUES)
def logs(
    run: RunName,
    node: Annotated[
        str | None,
        typer.Option("--node", help="Node such as node_0 or spot_1, see 'status'; by default the one of rank 0."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print the logs of all nodes, each line after its node's name.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", help="Print the last lines of each log, and do not wait for more.", min=0)
    ] = None,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Print the log of a node; while its job runs, what is added to it, too, unless --all or --tail is given."""
    from azureml_elastic.submit.client import readable_errors
    from azureml_elastic.submit.node_logs import read_log
    from azureml_elastic.submit.submitted import TERMINAL

    if every and node is not None:
        raise UsageError("--all and --node cannot be combined. Give one of them.")
    client, submitted, variables = open_run(run, subscription, group, workspace)
    with readable_errors(f"read the logs of {run!r}"):
        if every:
            for one in submitted.nodes():
                for line in _last_lines(read_log(client, one.job), tail):
                    typer.echo(f"{one.node} | {line}")
            return
        chosen = submitted.node(node or _leading_node(client, submitted, variables))
        typer.echo(f"azureml-elastic: {chosen.node}, {chosen.status} ({chosen.job})", err=True)
        if tail is None and chosen.status not in TERMINAL:
            client.jobs.stream(chosen.job)
            return
        for line in _last_lines(read_log(client, chosen.job), tail):
            typer.echo(line)


def _leading_node(client: Any, submitted: SubmittedRun, variables: Mapping[str, str]) -> str | None:
    """Return the job of rank 0's node by the run's table, else by the logs of the running nodes, if there are any."""
    from azureml_elastic.submit.node_logs import leading_node, read_log
    from azureml_elastic.submit.submitted import TERMINAL

    nodes = submitted.nodes()
    with contextlib.suppress(ElasticError):
        state = read_state(submitted, variables)
        if state is not None and state.leading_job in {node.job for node in nodes}:
            return state.leading_job
    running = [node for node in nodes if node.status not in TERMINAL]
    return leading_node({node.job: read_log(client, node.job) for node in running or nodes})


def _last_lines(text: str, count: int | None) -> list[str]:
    lines = text.splitlines()
    return lines if count is None else lines[max(0, len(lines) - count) :]


@explained(CONTINUES)
def download(
    run: RunName,
    to: Annotated[Path, typer.Option("--to", help="The folder to write to.")] = Path(),
    output: Annotated[
        str | None, typer.Option("--output", help="Name of one output; by default all outputs and the logs.")
    ] = None,
    node: NodeOption = None,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Download the outputs and logs of a node; an output with a path of its own is the same for all nodes."""
    from azureml_elastic.submit.client import readable_errors

    client, submitted, _ = open_run(run, subscription, group, workspace)
    chosen = _choose_node(submitted, node)
    wanted = {"all": True} if output is None else {"output_name": output}
    with readable_errors(f"download the outputs of {chosen.node}"):
        to.mkdir(parents=True, exist_ok=True)
        client.jobs.download(chosen.job, download_path=to, **wanted)
    typer.echo(f"{chosen.node} ({chosen.job}) is in {to.absolute()}")


@explained(CONTINUES)
def cancel(
    run: RunName, subscription: SubscriptionOption = None, group: GroupOption = None, workspace: WorkspaceOption = None
) -> None:
    """Cancel a run: its job, and the jobs of replacement nodes."""
    from azureml_elastic.submit.client import readable_errors

    _, submitted, _ = open_run(run, subscription, group, workspace)
    cancelled: list[str] = []

    def report(name: str) -> None:
        cancelled.append(name)
        typer.echo(f"cancelling {name}")

    with readable_errors(f"cancel the run {run!r}"):
        submitted.cancel(report)
    if not cancelled:
        typer.echo(f"{run} has ended already.")


def _choose_node(submitted: SubmittedRun, node: str | None) -> NodeOfRun:
    from azureml_elastic.submit.client import readable_errors

    with readable_errors(f"list the nodes of {submitted.name!r}"):
        return submitted.node(node)
