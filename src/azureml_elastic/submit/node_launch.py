"""The parts of a compiled job that start the node agent: command and environment variables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from azureml_elastic.config.command.program import FoundProgram, parse_program
from azureml_elastic.environment.names import PLAN
from azureml_elastic.submit.fields import JobFields
from azureml_elastic.submit.translation import translated_command

__all__ = ["CHECKPOINTS", "RUNTIME", "command_text", "environment_variables"]

RUNTIME = "azureml_elastic_runtime"
"""Name of the input that holds this library."""

CHECKPOINTS = "azureml_elastic_checkpoints"
"""Name of the output for checkpoints, shared by all nodes."""


def environment_variables(job: JobFields) -> dict[str, str]:
    """Return the environment variables of the presets, overridden by the job's own, and the plan."""
    sizes, together = job.network_location
    presets = job.presets.environment_variables(sizes, together=together)
    return {**presets, **job.environment_variables, PLAN: job.plan.to_json()}


def command_text(job: JobFields, found: FoundProgram, shared: Iterable[str] = ()) -> str:
    """Return the job's command with the node's entry point inserted before the program.

    Args:
        job: the job.
        found: position of the program in its command.
        shared: names of the outputs that all nodes write together although each is a job of its own.
    """
    translated = translated_command(job, found)
    found = translated.found
    interpreter = _quoted(parse_program([found.program]).interpreter or "python")
    script = f"${{{{inputs.{RUNTIME}}}}}" if job.delivery == "ship" else "-m azureml_elastic.node"
    if job.checkpoint.output is not None:
        folder = f"${{{{outputs.{CHECKPOINTS}}}}}"
    else:
        folder = _quoted(str(job.checkpoint.path))
    options = f"--checkpoint-dir {folder}"
    if translated.name is not None:
        options += f" --placeholders {translated.name}"
    options += "".join(f" --output {name}=${{{{outputs.{name}}}}}" for name in shared)
    return f"{found.before}{interpreter} {script} {options} -- {found.program}{found.after}"


def _quoted(word: str) -> str:
    """Quote a word for the shell, unless it has variables of the shell or expressions of Azure ML."""
    return word if "$" in word else shlex.quote(word)
