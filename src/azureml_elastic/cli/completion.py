"""Completion of a run's name in shells: folders of runs on this machine, and the newest jobs of the workspace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import typer

from azureml_elastic.cli.workspaces import WorkspaceOptions, find_workspace
from azureml_elastic.errors import ElasticError

__all__ = ["complete_run", "complete_submitted_run"]

_LONGEST_WAIT_SECONDS = 4.0
"""Time for the workspace to answer: who presses the key waits for it."""


def complete_run(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the runs on this machine and those of the workspace, with what describes them."""
    yield from _local_runs(incomplete)
    yield from complete_submitted_run(context, incomplete)


def complete_submitted_run(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the workspace's newest jobs, with their display names; none if it does not answer."""
    given = context.find_root().params  # the root command does not run for a completion
    options = WorkspaceOptions(given.get("subscription"), given.get("resource_group"), given.get("workspace_name"))
    found: list[tuple[str, str]] = []
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

        found += open_jobs(find_workspace(options)).newest()
