"""The run that a command's argument names, in the workspace that its options select."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.completion import complete_submitted_run
from azureml_elastic.cli.failures import require
from azureml_elastic.cli.workspaces import current_workspace

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

    from azureml_elastic.cli.workspace_jobs import Jobs
    from azureml_elastic.node.observation.run_state import RunState
    from azureml_elastic.node.table import Table
    from azureml_elastic.submit.run import ElasticRun
    from azureml_elastic.submit.submitted import SubmittedRun

__all__ = ["RunName", "open_client_run", "open_run", "open_run_table", "read_state"]

RunName = Annotated[
    str, typer.Argument(help="Name of the run, as printed by 'submit'.", autocompletion=complete_submitted_run)
]

_TABLE_TIMEOUT = timedelta(seconds=10)


def open_run(
    run: str,
) -> tuple[Jobs, ElasticRun, Mapping[str, str]]:
    """Return the jobs of the workspace, the run, and the environment variables that identify the workspace."""
    name = current_workspace()
    require(("azure.core", "azure-data-tables", "node"), ("azure.identity", "azure-identity", "node"))

    from azureml_elastic.cli.workspace_jobs import open_jobs
    from azureml_elastic.submit.client import silence_sdk_logs
    from azureml_elastic.submit.run import ElasticRun

    silence_sdk_logs()
    jobs = open_jobs(name)
    return jobs, ElasticRun(jobs, run), name.variables


def open_client_run(
    run: str,
) -> tuple[MLClient, SubmittedRun]:
    """Return azure-ai-ml's client of the workspace, and the run in it."""
    name = current_workspace()

    from azureml_elastic.submit.client import connect, readable_errors
    from azureml_elastic.submit.submitted import SubmittedRun

    client = connect(name.subscription, name.group, name.name)
    with readable_errors(f"read the run {run!r}"):
        return client, SubmittedRun(client, run)


def read_state(submitted: ElasticRun, variables: Mapping[str, str]) -> RunState | None:
    """Read the state of a run from its table with the user's login; return ``None`` if no node has started yet.

    Args:
        submitted: run.
        variables: environment variables that identify the workspace.

    Raises:
        ElasticError: the table cannot be opened or read, or the packages for it are not installed.
    """
    from azureml_elastic.node.observation.run_state import read_run_state

    with open_run_table(submitted, variables) as table:
        return read_run_state(table)


@contextlib.contextmanager
def open_run_table(submitted: ElasticRun, variables: Mapping[str, str]) -> Iterator[Table]:
    """Open the table of a run with the user's login; the arguments and errors are those of :func:`read_state`."""
    require(("azure.data.tables", "azure-data-tables", "node"), ("azure.identity", "azure-identity", "node"))

    from azureml_elastic.node.table import as_developer, open_table

    rendezvous = as_developer(submitted.plan.rendezvous)
    table = open_table(rendezvous, submitted.run_id, {**os.environ, **variables}, timeout=_TABLE_TIMEOUT)
    try:
        yield table
    finally:
        table.close()
