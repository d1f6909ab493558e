"""What this library adds to the user's job: a few names, variables, and the words before the program.

Everything here is text, decided without azure-ai-ml.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from azureml_elastic.config.command.program import FoundProgram, parse_program
from azureml_elastic.config.environment import PLAN
from azureml_elastic.config.resources import SERVERLESS

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

__all__ = [
    "CHECKPOINTS",
    "RUNTIME",
    "checkpoint_output",
    "command_text",
    "environment_variables",
    "nodes_of",
]

RUNTIME = "azureml_elastic_runtime"
"""The input that brings this library to the nodes."""

CHECKPOINTS = "azureml_elastic_checkpoints"
"""The output that all nodes share."""

_DEFAULT_CHECKPOINTS = "azureml://datastores/workspaceblobstore/paths/azureml-elastic/"


def environment_variables(job: ElasticCommandJob) -> dict[str, str]:
    """Return the variables of the job: the presets', the user's, which go before them, and the plan."""
    sizes, together = nodes_of(job)
    presets = job.presets.environment_variables(sizes, together=together)
    return {**presets, **job.environment_variables, PLAN: job.plan.to_json()}


def nodes_of(job: ElasticCommandJob) -> tuple[tuple[str | None, ...], bool]:
    """Return the VM sizes of the nodes, as far as the job says them, and whether all are in one cluster or one job.

    Nodes of a cluster are near each other; each job on serverless compute gets machines of its own.
    """
    if job.pools:
        computes = {pool.compute for pool in job.pools}
        sizes: tuple[str | None, ...] = tuple(pool.instance_type for pool in job.pools)
    else:
        computes, sizes = {str(job.compute or SERVERLESS)}, (job.resources.instance_type,)
    one_job = job.resources.effective_placement != "fan_out" or job.resources.max_instance_count == 1
    return sizes, one_job or (len(computes) == 1 and SERVERLESS not in computes)


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
