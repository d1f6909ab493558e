"""The run that a command's argument names, in the workspace that its options select.

A name is the folder of a run on this machine, or that of a submitted run. Shells complete it by the folders on this
machine and the newest jobs of the workspace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import require
from azureml_elastic.cli.workspaces import WorkspaceOptions, current_workspace, find_workspace
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

    from azureml_elastic.cli.workspace_jobs import Jobs
    from azureml_elastic.ledger.picture import Moment
    from azureml_elastic.node.table import Table
    from azureml_elastic.submit.run import ElasticRun
    from azureml_elastic.submit.submitted import SubmittedRun

_LONGEST_WAIT_SECONDS = 4.0
"""Time for the workspace to answer: who presses the key waits for it."""

_TABLE_TIMEOUT = timedelta(seconds=10)


def complete_run(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the runs on this machine and those of the workspace, with what describes them."""
    yield from _local_runs(incomplete)
    yield from complete_submitted_run(context, incomplete)


def complete_submitted_run(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the workspace's newest jobs, with their display names; none if it does not answer."""
    given = context.find_root().params  # the root command does not run for a completion
    options = WorkspaceOptions(given.get("subscription"), given.get("resource_group"), given.get("workspace_name"))
    found: list[tuple[str, str]] = []
    # A request that takes too long is left behind: the shell waits for the end of this process.
    asking = threading.Thread(target=_ask, args=(options, found), daemon=True)
    asking.start()
    asking.join(_LONGEST_WAIT_SECONDS)
    yield from ((name, text) for name, text in list(found) if name.startswith(incomplete))


def _local_runs(incomplete: str) -> Iterator[tuple[str, str]]:
    for events in sorted(Path("runs").glob("*/events"), reverse=True):
        name = str(events.parent)
        if name.startswith(incomplete):
            yield name, "run on this machine"


def _ask(options: WorkspaceOptions, found: list[tuple[str, str]]) -> None:
    with contextlib.suppress(ElasticError, ImportError):
        from azureml_elastic.cli.workspace_jobs import open_jobs

        found += open_jobs(find_workspace(options)).service.newest()


RunArgument = Annotated[
    str,
    typer.Argument(help="Folder of a run on this machine, or name of a submitted run.", autocompletion=complete_run),
]

RunName = Annotated[
    str, typer.Argument(help="Name of the run, as printed by 'submit'.", autocompletion=complete_submitted_run)
]


def run_folder(run: str) -> Path | None:
    """Return the folder that an argument names, ``None`` for the name of a submitted run.

    Raises:
        UsageError: it is the path of a folder that does not exist.
    """
    folder = Path(run)
    if folder.is_dir():
        return folder
    if folder.name != run:
        raise UsageError(f"There is no folder {run}. Give the folder of a local run, or the name of a submitted one.")
    return None


def open_run(run: str) -> tuple[Jobs, ElasticRun, Mapping[str, str]]:
    """Return the jobs of the workspace, the run, and the environment variables that identify the workspace."""
    name = current_workspace()
    require(("azure.core", "azure-data-tables", "node"), ("azure.identity", "azure-identity", "node"))

    from azureml_elastic.cli.workspace_jobs import open_jobs
    from azureml_elastic.submit.run import ElasticRun

    jobs = open_jobs(name)
    return jobs, ElasticRun(jobs, run), name.variables


def open_client_run(run: str) -> tuple[MLClient, SubmittedRun]:
    """Return azure-ai-ml's client of the workspace, and the run in it."""
    name = current_workspace()

    from azureml_elastic.submit.client import connect, readable_errors
    from azureml_elastic.submit.submitted import SubmittedRun

    client = connect(name.subscription, name.group, name.name)
    with readable_errors(f"read the run {run!r}"):
        return client, SubmittedRun(client, run)


def read_state(submitted: ElasticRun, variables: Mapping[str, str]) -> Moment | None:
    """Read the state of a run from its table with the user's login; return ``None`` if no node has started yet.

    Args:
        variables: environment variables that identify the workspace.

    Raises:
        ElasticError: the table cannot be opened or read, or the packages for it are not installed.
    """
    from azureml_elastic.node.records.observation import read_run_state

    with open_run_table(submitted, variables) as table:
        return read_run_state(table)


@contextlib.contextmanager
def open_run_table(submitted: ElasticRun, variables: Mapping[str, str]) -> Iterator[Table]:
    """Open the table of a run with the user's login; the arguments and errors are those of :func:`read_state`."""
    require(("azure.data.tables", "azure-data-tables", "node"), ("azure.identity", "azure-identity", "node"))

    from azureml_elastic.node.table import as_developer, open_table

    rendezvous = as_developer(submitted.plan.rendezvous)
    table = open_table(
        rendezvous, submitted.run_id, NodeEnvironment.read().with_variables(variables), timeout=_TABLE_TIMEOUT
    )
    try:
        yield table
    finally:
        table.close()
