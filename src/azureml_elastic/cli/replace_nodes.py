"""``azureml-elastic supervise``: replaces lost nodes of a run, also where no node is left to do it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import GOES_ON, explained, require
from azureml_elastic.cli.runs import RunName
from azureml_elastic.cli.workspaces import (
    GroupOption,
    SubscriptionOption,
    WorkspaceOption,
    find_workspace,
)
from azureml_elastic.errors import ElasticError, RunFailed, UsageError

if TYPE_CHECKING:
    from azureml_elastic.node.replacement.replacer import Outlook, Supervisor

__all__ = ["supervise"]


def supervise(
    run: RunName,
    every: Annotated[
        float | None, typer.Option(min=0.5, help="Seconds between two looks; by default as the job says.")
    ] = None,
    max_replacements: Annotated[
        int | None, typer.Option(min=0, help="Node jobs that may be submitted; by default as the job says.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.01, help="USD after which none is asked for; by default as the job says.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, do what is to be done, and exit.")] = False,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Replace lost nodes of a run until it ends, with your own login; see docs/pools.md."""
    with explained(GOES_ON):
        place = find_workspace(subscription, group, workspace)
        require(("azure.data.tables", "azure-data-tables", "node"), ("azure.identity", "azure-identity", "node"))

        from azureml_elastic.node.replacement.remote import open_supervisor

        given = {"max_replacements": max_replacements, "budget": budget}
        changes = {name: value for name, value in given.items() if value is not None}
        with open_supervisor({**os.environ, **place.variables}, run, changes) as (supervisor, policy):
            said = ""
            pause = policy.interval.total_seconds() if every is None else every
            while True:
                outlook = _act(supervisor, patient=not once)
                if outlook is not None:
                    said = _tell(outlook, said)
                    if outlook.over or outlook.hopeless:
                        break
                if once:
                    return
                time.sleep(pause)
        if outlook.hopeless:
            raise RunFailed(f"The run has no node left, and none may be asked for. {outlook.limit}")
        if not outlook.succeeded:
            raise RunFailed(outlook.message)


def _act(supervisor: Supervisor, *, patient: bool) -> Outlook | None:
    """Look and act once; where somebody is away and that is borne, say so and return ``None``."""
    try:
        return supervisor.act()
    except UsageError:
        raise
    except ElasticError as error:
        if not patient:
            raise
        typer.echo(f"azureml-elastic: {error} Looking again.", err=True)
        return None


def _tell(outlook: Outlook, said: str) -> str:
    """Print what was done, and how the run stands where that was not said before; return what was said."""
    text = _line(outlook)
    if text != said:
        typer.echo(text)
    for done in outlook.done:
        typer.echo(f"  {done}")
    return text


def _line(outlook: Outlook) -> str:
    counts: dict[str, list[int]] = {}
    for job in outlook.jobs:
        if not job.submitted:
            continue
        of_pool = counts.setdefault(outlook.pools[job.pool].compute, [0, 0])
        of_pool[0] += job.state == "running"
        of_pool[1] += job.state == "waiting"
    nodes = ", ".join(f"{pool}: {running} run, {waiting} wait" for pool, (running, waiting) in counts.items())
    limit = f" {outlook.limit}" if outlook.limit and not outlook.over else ""
    return f"{outlook.message} {nodes}.{limit}"
