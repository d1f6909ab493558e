"""Steps of the user's pipelines, which are elastic jobs that are called with inputs, and sweeps of elastic jobs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from azureml_elastic.environment import names as variables
from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit import node_launch
from azureml_elastic.submit.bindings import LITERALS, Bound, bindings_of, bound
from azureml_elastic.submit.compilation import (
    compile_job,
    declaration,
    fan_out_nodes,
    has_no_value,
    identification,
    inputs_of,
    outputs_of,
    resolved,
    shared_outputs,
    single,
)
from azureml_elastic.submit.fields import JobFields, field_of, given_fields
from azureml_elastic.submit.sdk_hooks import outside_pipelines, position_in_pipelines
from azureml_elastic.submit.step_edits import as_step
from azureml_elastic.submit.validation import check

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml import Output
    from azure.ai.ml.entities import Command, Pipeline, PipelineComponent, PipelineJob, Sweep

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


def compile_node(job: JobFields) -> Command | PipelineJob:
    """Return the job as a new entity, which may become a step of a pipeline: that of one node is one."""
    made = compile_job(job)
    return as_step(made, None, job, lambda changed: (compile_job(changed), None)) if isinstance(made, Command) else made


def compile_step(job: JobFields, position: str) -> Command | Pipeline:
    """Return the job as a new node of azure-ai-ml, which is added to the pipeline whose function is running.

    The nodes of a ``fan_out`` job are a pipeline within the pipeline. They have the id of the outermost pipeline alone
    in common with each other, and with the nodes of its other steps: the position tells these apart. It is text of the
    job, and the id that it completes is new for each submission.

    Args:
        position: text that no other step of the pipeline has.
    """
    node, template = _node(job, position)
    return as_step(node, template, job, functools.partial(_node, position=position))


def _node(job: JobFields, position: str) -> tuple[Command | Pipeline, Command | None]:
    """Return a step's node, and where that is a pipeline a command with the settings of its nodes."""
    job = resolved(job)
    fan_out = job.resources.effective_placement == "fan_out"
    if fan_out:
        # A replacement job is derived from the submitted pipeline, which is the user's.
        own = {variables.STEP: f"step-{position}", **job.environment_variables}
        job = job.model_copy(update={"environment_variables": own, "replacement": None})
    text = node_launch.command_text(job, check(job), shared_outputs(job))
    with outside_pipelines():
        called: Any = _component_of_nodes(job, text) if fan_out else single(job, text, unset=job.inputs)
        template = next(iter(called.jobs.values()))() if fan_out else None
    node = called(**_given(job)) if fan_out else called(**bindings_of(job.inputs))
    node.display_name = job.display_name
    node.properties = dict(job.properties)
    if fan_out:
        node.tags = dict(job.tags)
        for name, output in outputs_of(job).items():
            if name in job.outputs and output is not None:
                setattr(node.outputs, name, output)
    return node, template


def _given(job: JobFields) -> dict[str, Any]:
    """Return what the inputs of a step of several nodes are called with, without those that have no value yet."""
    values = {name: value for name, value in inputs_of(job, unset=job.inputs).items() if not has_no_value(value)}
    return {**values, **bindings_of(job.inputs)}


def _component_of_nodes(job: JobFields, text: str) -> PipelineComponent:
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


def compile_sweep(job: JobFields, search_space: Mapping[str, Any], options: Mapping[str, Any]) -> Sweep:
    """Return a sweep whose trials are this job; see :meth:`~azureml_elastic.submit.job.ElasticCommandJob.sweep`."""
    if job.resources.effective_placement == "fan_out":
        raise SubmitError(
            "A trial of a sweep is one job, but with the placement 'fan_out' each node is a job of its own. Take "
            "job.with_options(resources={'placement': 'gang'}).sweep(...), or the placement 'service'."
        )
    unknown = sorted(search_space.keys() - job.inputs.keys())
    if unknown:
        raise SubmitError(
            f"search_space has {unknown[0]!r}, which is no input of the job. Declare it with any value, as in "
            f"inputs={{{unknown[0]!r}: 1}}, and write ${{{{inputs.{unknown[0]}}}}} in the command."
        )
    search = {name: value.value for name, value in job.inputs.items() if isinstance(value, Bound) and value.searched}
    search |= search_space
    if not search:
        raise SubmitError(
            "The sweep searches nothing: no input is a search expression. Give search_space={'lr': Uniform(0.01, "
            "0.1)}, or job(lr=Uniform(0.01, 0.1)).sweep(...)."
        )
    if job.services:
        raise SubmitError(
            "azure-ai-ml carries no interactive services to the trials of a sweep. Leave services out, as in "
            "job.model_copy(update={'services': None}).sweep(...)."
        )
    unset = search if position_in_pipelines() is None else job.inputs
    made = functools.partial(_sweep, search=search, options=options, unset=unset)
    return as_step(made(job), None, job, lambda changed: (made(changed), None))


def _sweep(job: JobFields, search: Mapping[str, Any], options: Mapping[str, Any], unset: Collection[str]) -> Sweep:
    """Return a sweep.

    Args:
        unset: see :func:`single`. In a pipeline any input may come from another step; by itself, a sweep gives values
            to what it searches alone.
    """
    job = resolved(job)
    text = node_launch.command_text(job, check(job))
    with outside_pipelines():
        trial: Any = single(job, text, unset=unset)(**{**bindings_of(job.inputs), **search})
    for name, value in identification(job).items():
        setattr(trial, name, value)
    # A sweep takes from its trial what the component has, and the resources of a command are those of its node. As a
    # step of a pipeline it has them itself.
    trial.component.resources = trial.resources
    if job.timeout is not None:
        options = {"trial_timeout": trial.limits.timeout, **options}
    sweep: Sweep = trial.sweep(**options)
    sweep.resources = trial.resources
    return sweep
