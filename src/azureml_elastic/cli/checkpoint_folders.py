"""The folder of a run's checkpoints, by what a command's argument names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_elastic.checkpoint.format.manifest import FolderName
from azureml_elastic.checkpoint.storage.locations import is_remote, join_path
from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from azureml_elastic.cli.workspace_jobs import Jobs
    from azureml_elastic.submit.run import ElasticRun

__all__ = ["folder_of_files", "folder_of_submitted"]

_IN_DATASTORE = re.compile(r"azureml:/+(?:.*/)?datastores/([^/]+)/paths/(.*)")


def folder_of_files(path: Path) -> Path:
    """Return the folder of checkpoints in a folder: that of a run, of its checkpoints, or of those of several runs.

    Raises:
        UsageError: there are no checkpoints, or those of several runs.
    """
    # A job's nodes make a folder for their run in the one that they are given.
    places = [path, path / "checkpoints"]
    places += [below for place in places if place.is_dir() for below in sorted(place.iterdir()) if below.is_dir()]
    found = [place for place in places if _has_checkpoints(place)]
    if not found:
        raise UsageError(f"There are no checkpoints in {path}.")
    if len(found) > 1 and found[0] not in places[:2]:
        names = ", ".join(place.name for place in found)
        raise UsageError(f"{path} has the checkpoints of several runs: {names}. Give the folder of one of them.")
    return found[0]


def folder_of_submitted(run: ElasticRun, jobs: Jobs) -> str:
    """Return the URL of a submitted run's checkpoints.

    Raises:
        UsageError: they are in a folder of the nodes, or in a place that only the nodes know.
        WorkspaceForbidden: the login may not read the datastore.
        WorkspaceUnavailable: the workspace does not answer.
    """
    output = run.plan.checkpoint.output
    if output is None:
        path = str(run.checkpoint_path)
        if is_remote(path):
            return join_path(path, run.run_id)
        raise UsageError(
            f"The checkpoints of {run.name} are in the folder {join_path(path, run.run_id)} of its nodes. Give that "
            "folder on a machine that has it, or what it is mounted from."
        )
    match = _IN_DATASTORE.fullmatch(output)
    container = None if match is None or "${{" in output else jobs.container_url(match[1])
    if match is None or container is None:
        raise UsageError(
            f"The checkpoints of {run.name} are below {output}, whose container is not known here. Give its URL, such "
            f"as abfs://container@account.dfs.core.windows.net/path/{run.run_id}."
        )
    return join_path(join_path(container, match[2].strip("/")), run.run_id)


def _has_checkpoints(folder: Path) -> bool:
    return folder.is_dir() and any(FolderName.parse(each.name) is not None for each in folder.iterdir())
