"""Compilation of an elastic job to entities of azure-ai-ml, through its public names only.

Every compilation creates new entities: azure-ai-ml modifies the entities it submits (paths and names become ids), so
objects that the job holds are copied.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from azureml_elastic.config.presets import Presets, mode_of_input
from azureml_elastic.config.resources import SERVERLESS, NodePool, first_nodes, step_names
from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit import node_launch
from azureml_elastic.submit.expressions import without_options
from azureml_elastic.submit.fields import JobFields, field_of
from azureml_elastic.submit.runtime.staging import stage_runtime
from azureml_elastic.submit.sdk_hooks import outside_pipelines
from azureml_elastic.submit.services import compile_services
from azureml_elastic.submit.validation import check

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml import Input, Output, PyTorchDistribution, command
    from azure.ai.ml import sweep as search
    from azure.ai.ml.entities import (
        Command,
        Environment,
        JobResourceConfiguration,
        PipelineJob,
        PipelineJobSettings,
        QueueSettings,
        Sweep,
    )

__all__ = ["compile_job", "compile_sweep"]

_LITERALS = {bool: "boolean", int: "integer", float: "number", str: "string"}
_LABELLED = re.compile(r"azureml:[\w.-]+@[\w.-]+", re.ASCII)
_SEARCH_EXPRESSIONS = (
    *(search.Choice, search.Randint, search.Uniform, search.LogUniform, search.Normal, search.LogNormal),
    *(search.QUniform, search.QLogUniform, search.QNormal, search.QLogNormal),
)
_LITERAL_TYPES = frozenset(_LITERALS.values())


def compile_job(job: JobFields) -> Command | PipelineJob:
    """Return the job as a new entity of azure-ai-ml, which is in no pipeline of the user's."""
    job = _with_options_resolved(job)
    text = node_launch.command_text(job, check(job))
    with outside_pipelines():
        if job.resources.effective_placement == "fan_out":
            return _fan_out(job, text)
        return _single(job, text)


def _with_options_resolved(job: JobFields) -> JobFields:
    """Return the job without optional inputs that have no value, and without what its command has for them.

    Azure ML resolves ``$[[...]]`` in components alone, and the agent's own command must have a program that is certain.
    """
    given = {name: value for name, value in job.inputs.items() if not _is_left_out(value)}
    command = without_options(job.command, given)
    if command == job.command and len(given) == len(job.inputs):
        return job
    return job.model_copy(update={"command": command, "inputs": given})


def _is_left_out(value: Any) -> bool:
    """Return whether an input is optional and has no value."""
    return bool(field_of(value, "optional")) and field_of(value, "default") is None and field_of(value, "path") is None


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
    if job.services:
        raise SubmitError(
            "azure-ai-ml carries no interactive services to the trials of a sweep. Leave services out, as in "
            "job.model_copy(update={'services': None}).sweep(...)."
        )
    job = _with_options_resolved(job)
    text = node_launch.command_text(job, check(job))
    with outside_pipelines():
        trial: Any = _single(job, text)(**search_space)
    # A sweep takes from its trial what the component has, and the resources of a command are those of its node. As a
    # step of a pipeline it has them itself.
    trial.component.resources = trial.resources
    if job.timeout is not None:
        options = {"trial_timeout": trial.limits.timeout, **options}
    sweep: Sweep = trial.sweep(**options)
    sweep.resources = trial.resources
    return sweep


def _fan_out(job: JobFields, text: str) -> PipelineJob:
    """Return a pipeline of single-node jobs, each scheduled independently.

    The nodes inherit the pipeline's compute, so that ``create_or_update(job, compute=...)`` applies to them. All nodes
    call one component; ``force_rerun`` keeps Azure ML from reusing the result of an equal call.
    """
    inputs = _inputs(job)
    node = _command(job, text, inputs={name: _declaration(value) for name, value in inputs.items()})
    children: dict[str, Any] = {}
    for name, pool in _first_nodes(job):
        child = node(**{name: f"${{{{parent.inputs.{name}}}}}" for name in inputs})
        child.display_name = name
        child.resources = _resources(job, pool, instance_count=1)
        child.services = compile_services(job.services, len(children))
        if pool is not None:
            child.compute = pool.compute
            if pool.job_tier is not None:
                child.queue_settings = QueueSettings(job_tier=pool.job_tier, priority=job.priority)
        children[name] = child
    return PipelineJob(
        jobs=children,
        inputs=inputs,
        compute=job.pools[0].compute if job.pools else str(job.compute or SERVERLESS),
        settings=PipelineJobSettings(continue_on_step_failure=True, force_rerun=True),
        **_identification(job),
    )


def _first_nodes(job: JobFields) -> Iterator[tuple[str, NodePool | None]]:
    """Yield the name and pool of each node that is requested at submission."""
    stems = step_names(job.pools)
    counts = first_nodes(job.pools, job.resources.max_instance_count) or (job.resources.max_instance_count,)
    for stem, pool, count in zip(stems, job.pools or (None,), counts, strict=True):
        yield from ((f"{stem}_{number}", pool) for number in range(count))


def _single(job: JobFields, text: str) -> Command:
    """Return one command job whose nodes the service starts: all at once (gang), or the minimum first (service)."""
    least, most = job.resources.min_instance_count, job.resources.max_instance_count
    counts = {"instance_count": most}
    if job.resources.effective_placement == "service":
        counts = {"instance_count": least, "max_instance_count": most}
    entity = _command(
        job,
        text,
        inputs=_inputs(job),
        compute=job.compute,
        # Azure ML starts the command on every node only if there is a distribution.
        distribution=PyTorchDistribution(process_count_per_instance=1) if most > 1 else None,
        services=compile_services(job.services),
        parent_job_name=job.parent_job_name,
        **_identification(job),
    )
    entity.resources = _resources(job, None, **counts)
    return entity


def _command(job: JobFields, text: str, **fields: Any) -> Command:
    return command(
        command=text,
        code=None if job.code is None else str(job.code),
        environment=_environment(job.environment),
        environment_variables=node_launch.environment_variables(job),
        outputs=_outputs(job),
        identity=copy.deepcopy(job.identity),
        timeout=None if job.timeout is None else math.ceil(job.timeout.total_seconds()),
        job_tier=job.job_tier,
        priority=job.priority,
        is_deterministic=False,
        **fields,
    )


def _environment(environment: Any) -> str | Environment:
    if isinstance(environment, str):
        # azure-ai-ml resolves 'name:version' with or without the scheme, but a label only without it.
        return environment.removeprefix("azureml:") if _LABELLED.fullmatch(environment) else environment
    if type(environment) is dict:
        return Environment(**environment)
    if not isinstance(environment, Environment):
        raise SubmitError(
            f"The environment is of the type {type(environment).__name__}. Give a name, as in "
            "'azureml:my-environment@latest', an Environment from azure.ai.ml.entities, or its fields."
        )
    return copy.deepcopy(environment)


def _identification(job: JobFields) -> dict[str, Any]:
    return {
        "name": job.name,
        "display_name": job.display_name,
        "experiment_name": job.experiment_name,
        "description": job.description,
        "tags": dict(job.tags),
        "properties": dict(job.properties),
    }


def _resources(job: JobFields, pool: NodePool | None, **counts: int) -> JobResourceConfiguration:
    resources = job.resources
    docker_args = resources.docker_args
    return JobResourceConfiguration(
        **counts,
        instance_type=resources.instance_type if pool is None else pool.instance_type,
        locations=None if resources.locations is None else list(resources.locations),
        docker_args=list(docker_args) if isinstance(docker_args, tuple) else docker_args,
        shm_size=resources.shm_size,
        properties=None if resources.properties is None else copy.deepcopy(dict(resources.properties)),
    )


def _inputs(job: JobFields) -> dict[str, Any]:
    inputs = {name: _input(name, value, job.presets) for name, value in job.inputs.items()}
    if job.delivery == "ship":
        inputs[node_launch.RUNTIME] = Input(type="uri_file", path=str(stage_runtime()), mode="download")
    return inputs


def _input(name: str, value: Any, presets: Presets) -> Any:
    """Return an input of the job: a literal, or a new ``Input`` with a path and a mode."""
    if type(value) in _LITERALS:
        return value
    if type(value) is dict:
        value = Input(**value)
    if isinstance(value, _SEARCH_EXPRESSIONS):
        raise SubmitError(
            f"The input {name!r} is a search expression, which only a sweep has a value for. Give the input any value, "
            f"and job.sweep(search_space={{{name!r}: {type(value).__name__}(...)}}, primary_metric=..., goal=...)."
        )
    if not isinstance(value, Input):
        raise SubmitError(
            f"The input {name!r} is of the type {type(value).__name__}. Give a number, a text, a truth value, or an "
            "Input from azure.ai.ml."
        )
    given = value.default if value.type in _LITERAL_TYPES else value.path
    if given is None:
        raise SubmitError(
            f"The input {name!r} of type {value.type!r} has no value. Give Input(type=..., path=...), or the bare "
            "value for a number or a text."
        )
    if value.type in _LITERAL_TYPES:
        return given
    made = copy.deepcopy(value)
    if made.mode is None:
        made.mode = mode_of_input(presets.data, str(made.type))
    return made


def _declaration(value: Any) -> Input:
    """Return the declaration of an input in the component: its type and mode, without a value."""
    if isinstance(value, Input):
        return Input(type=value.type, mode=value.mode)
    return Input(type=_LITERALS[type(value)])


def _outputs(job: JobFields) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for name, output in job.outputs.items():
        if not (output is None or type(output) is dict or isinstance(output, Output)):
            raise SubmitError(
                f"The output {name!r} is of the type {type(output).__name__}. Give an Output from azure.ai.ml, as in "
                "Output(type='uri_folder', path=...), or its fields."
            )
        outputs[name] = copy.deepcopy(output)
    uri = job.checkpoint.output
    if uri is not None:
        outputs[node_launch.CHECKPOINTS] = Output(type="uri_folder", mode="rw_mount", path=uri)
    return outputs
