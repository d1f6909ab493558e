"""Steps of the user's pipelines: an elastic job that is called with inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from azureml_elastic.environment import names as variables
from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit import node_launch
from azureml_elastic.submit.bindings import LITERALS, Bound, bindings_of, bound
from azureml_elastic.submit.changes import given_fields
from azureml_elastic.submit.compilation import (
    declaration,
    fan_out_nodes,
    has_no_value,
    inputs_of,
    outputs_of,
    resolved,
    shared_outputs,
    single,
)
from azureml_elastic.submit.fields import JobFields, field_of
from azureml_elastic.submit.sdk_hooks import outside_pipelines
from azureml_elastic.submit.validation import check

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml import Output
    from azure.ai.ml.entities import Command, Pipeline, PipelineComponent

__all__ = ["compile_step", "with_inputs"]

_COMPONENT = "elastic_nodes"
_Job = TypeVar("_Job", bound=JobFields)


def with_inputs(job: _Job, inputs: Mapping[str, Any]) -> _Job:
    """Return a copy of a job with other values of its inputs, whose types and modes stay; ``None`` removes a value."""
    unknown = sorted(inputs.keys() - job.inputs.keys())
    if unknown:
        known = f"its inputs are {', '.join(job.inputs)}" if job.inputs else "it has none"
        raise SubmitError(
            f"The job was called with {unknown[0]!r}, which is no input of it; {known}. Declare it, as in "
            f"inputs={{{unknown[0]!r}: Input(type='uri_folder')}}, and write ${{{{inputs.{unknown[0]}}}}} in the "
            "command."
        )
    changed = {
        name: _as_declared(held, bound(inputs[name])) if name in inputs else held
        for name, held in job.inputs.items()
        if inputs.get(name, held) is not None
    }
    return type(job)(**{**given_fields(job), "inputs": changed})


def _as_declared(held: Any, value: Any) -> Any:
    """Return an input with the type and the mode of the one that it replaces."""
    if not isinstance(value, Bound):
        return value
    declared = field_of(held, "type") or LITERALS.get(type(held))
    literals = LITERALS.values()
    # A number may be bound where the job has a whole one; a type of data is declared as the script needs it.
    kind = value.type if value.type in literals and not value.searched else declared or value.type
    return dataclasses.replace(value, type=kind, mode=field_of(held, "mode"))


def compile_step(job: JobFields, position: str) -> Command | Pipeline:
    """Return the job as a new node of azure-ai-ml, which is added to the pipeline whose function is running.

    The nodes of a ``fan_out`` job are a pipeline within the pipeline. They have the id of the outermost pipeline alone
    in common with each other, and with the nodes of its other steps: the position tells these apart. It is text of the
    job, and the id that it completes is new for each submission.

    Args:
        job: job with the step's inputs.
        position: text that no other step of the pipeline has.
    """
    job = resolved(job)
    fan_out = job.resources.effective_placement == "fan_out"
    if fan_out:
        # A replacement job is derived from the submitted pipeline, which is the user's.
        own = {variables.STEP: f"step-{position}", **job.environment_variables}
        job = job.model_copy(update={"environment_variables": own, "replacement": None})
    text = node_launch.command_text(job, check(job), shared_outputs(job))
    with outside_pipelines():
        called: Any = _component_of_nodes(job, text) if fan_out else single(job, text, unset=job.inputs)
    node = called(**_given(job)) if fan_out else called(**bindings_of(job.inputs))
    node.display_name = job.display_name
    node.properties = dict(job.properties)
    if fan_out:
        node.tags = dict(job.tags)
        for name, output in outputs_of(job).items():
            if name in job.outputs and output is not None:
                setattr(node.outputs, name, output)
    made: Command | Pipeline = node
    return made


def _given(job: JobFields) -> dict[str, Any]:
    """Return what the inputs of a step of several nodes are called with, without those that have no value yet."""
    values = {name: value for name, value in inputs_of(job, unset=job.inputs).items() if not has_no_value(value)}
    return {**values, **bindings_of(job.inputs)}


def _component_of_nodes(job: JobFields, text: str) -> PipelineComponent:
    """Return the nodes of a job as a component, whose outputs are those of the first node."""
    inputs = inputs_of(job, unset=job.inputs)
    children = fan_out_nodes(job, text, inputs)
    types = {name: field_of(output, "type") for name, output in job.outputs.items()}
    outputs = {name: Output(type=kind or "uri_folder") for name, kind in types.items()}
    for child in children.values():
        if child.compute is None and job.compute is not None:
            child.compute = str(job.compute)
    return PipelineComponent(
        name=_COMPONENT,
        display_name=job.display_name,
        inputs={name: declaration(value) for name, value in inputs.items()},
        outputs=outputs,
        jobs=children,
    )
