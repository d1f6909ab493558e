"""What this library adds to the user's job: a few names, variables, and the words before the program.

Everything here is text, decided without azure-ai-ml.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from azureml_elastic.spec.command import FoundProgram, parse_program
from azureml_elastic.spec.environment import PLAN

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

__all__ = [
    "CHECKPOINTS",
    "RUNTIME",
    "checkpoint_output",
    "command_text",
    "environment_variables",
]

RUNTIME = "azureml_elastic_runtime"
"""The input that brings this library to the nodes."""

CHECKPOINTS = "azureml_elastic_checkpoints"
"""The output that all nodes share."""

_DEFAULT_CHECKPOINTS = "azureml://datastores/workspaceblobstore/paths/azureml-elastic/"

_UNCACHED_MOUNTS = {
    "DATASET_MOUNT_CACHE_SIZE": "0",
    "DATASET_MOUNT_ATTRIBUTE_CACHE_TTL": "1",
    "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "False",
    "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "False",
    "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
}
"""A mounted folder caches what it has read; a restarted node must see what another has just written."""


def environment_variables(job: ElasticCommandJob) -> dict[str, str]:
    """Return the variables of the job: the mount's, the user's, which go before them, and the plan."""
    return {**_UNCACHED_MOUNTS, **job.environment_variables, PLAN: job.plan.to_json()}


def checkpoint_output(job: ElasticCommandJob) -> str | None:
    """Return the URI of the output that holds the checkpoints; ``None`` where ``path`` is the nodes' own.

    The URI is the same for every node and every run; the nodes make a folder for each run below it.
    """
    path = job.checkpoint.path
    if path is None:
        return _DEFAULT_CHECKPOINTS
    return path if path.startswith("azureml:") else None


def command_text(job: ElasticCommandJob, found: FoundProgram) -> str:
    """Return the command of the compiled job: the user's, with the node's entry before the program.

    Args:
        job: whose command it is.
        found: where its program stands.
    """
    interpreter = parse_program([found.program]).interpreter or "python"
    if job.delivery == "ship":
        entry = f"{_quoted(interpreter)} ${{{{inputs.{RUNTIME}}}}}/start.py"
    else:
        entry = f"{_quoted(interpreter)} -m azureml_elastic.node"
    if checkpoint_output(job) is not None:
        folder = f"${{{{outputs.{CHECKPOINTS}}}}}"
    else:
        folder = _quoted(str(job.checkpoint.path))
    return f"{found.before}{entry} --checkpoint-dir {folder} -- {found.program}{found.after}"


def _quoted(word: str) -> str:
    """Quote a word for the shell, but not where it has Azure ML's expressions or the shell's variables."""
    return word if re.search(r"\$", word) else shlex.quote(word)
