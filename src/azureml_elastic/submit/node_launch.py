"""The parts of a compiled job that start the node agent, command and environment variables, and interactive services.

With the placements ``service`` and ``gang`` Azure ML starts the services of the one job, on its first node or on all.
With ``fan_out`` each node is a separate job, so the selection is made here: shells and notebooks are useful on any
node, whereas one TensorBoard is enough.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from azureml_elastic.config.frozen import is_fields
from azureml_elastic.environment.names import PLAN
from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.program.command import FoundProgram, parse_program
from azureml_elastic.submit.expressions import translated_command
from azureml_elastic.submit.fields import JobFields, field_of

RUNTIME = "azureml_elastic_runtime"
"""Name of the input that holds this library."""

CHECKPOINTS = "azureml_elastic_checkpoints"
"""Name of the output for checkpoints, shared by all nodes."""

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml.entities import JupyterLabJobService, SshJobService, TensorBoardJobService, VsCodeJobService


_SERVICES = {
    "jupyter_lab": JupyterLabJobService,
    "ssh": SshJobService,
    "tensor_board": TensorBoardJobService,
    "vs_code": VsCodeJobService,
}
_ONCE = frozenset({"tensor_board"})
"""Services that show the run rather than the node; they run on the first node unless ``nodes="all"``."""


def environment_variables(job: JobFields) -> dict[str, str]:
    """Return the environment variables of the presets, overridden by the job's own, and the plan."""
    sizes, together = job.network_location
    presets = job.presets.environment_variables(sizes, together=together)
    return {**presets, **job.environment_variables, PLAN: job.plan.to_json()}


def command_text(job: JobFields, found: FoundProgram, shared: Iterable[str] = ()) -> str:
    """Return the job's command with the node's entry point inserted before the program.

    Args:
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


def compile_services(services: Mapping[str, Any] | None, node: int | None = None) -> dict[str, Any] | None:
    """Return new service objects for a job; dictionaries are converted because azure-ai-ml drops their type.

    In a single-node job of ``fan_out``, JupyterLab, VS Code, SSH and services of unknown kinds run on every node,
    regardless of ``nodes``, because it is not known in advance which nodes get a machine. TensorBoard runs on node 0,
    and with ``nodes="all"`` on every node.

    Args:
        services: services of the elastic job by name: objects of azure-ai-ml or dictionaries of their fields.
        node: index of the node of a single-node job; ``None`` for the one job of all nodes.
    """
    compiled: dict[str, Any] = {}
    for name, service in (services or {}).items():
        kind = str(field_of(service, "type") or field_of(service, "job_service_type") or "")
        if node and kind in _ONCE and field_of(service, "nodes") != "all":
            continue
        if not is_fields(service) and (kind or not hasattr(service, "type")):
            compiled[name] = copy.deepcopy(service)
        elif kind in _SERVICES:
            fields = {key: value for key, value in service.items() if key not in {"type", "job_service_type"}}
            compiled[name] = _SERVICES[kind](**copy.deepcopy(fields))
        else:
            raise SubmitError(
                f"The service {name!r} has type={kind!r}. Give one of {sorted(_SERVICES)}, or an object of "
                "azure.ai.ml.entities."
            )
        if node is not None and field_of(compiled[name], "nodes") is not None:
            compiled[name].nodes = None  # a single-node job must not have it
    return compiled or None
