"""Compilation of an elastic job to entities of azure-ai-ml, through its public names only.

Every compilation creates new entities: azure-ai-ml modifies the entities it submits (paths and names become ids), so
objects that the job holds are copied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from azureml_elastic.config.resources import SERVERLESS, NodePool, first_nodes, step_names
from azureml_elastic.environment.names import FIRST_NODE
from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit import node_launch
from azureml_elastic.submit.bindings import LITERALS
from azureml_elastic.submit.expressions import without_options
from azureml_elastic.submit.fields import JobFields, field_of
from azureml_elastic.submit.local_files import checked_code
from azureml_elastic.submit.node_launch import compile_services
from azureml_elastic.submit.runtime.staging import stage_runtime
from azureml_elastic.submit.sdk_hooks import outside_pipelines
from azureml_elastic.submit.sdk_values import made_environment, made_identity, made_input, made_output
from azureml_elastic.submit.validation import check

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml import Input, Output, PyTorchDistribution, command
    from azure.ai.ml.entities import Command, JobResourceConfiguration, PipelineJob, PipelineJobSettings, QueueSettings


def compile_job(job: JobFields) -> Command | PipelineJob:
    """Return the job as a new entity of azure-ai-ml, which is in no pipeline of the user's."""
    job = resolved(job)
    text = node_launch.command_text(job, check(job), shared_outputs(job))
    with outside_pipelines():
        if job.resources.effective_placement == "fan_out":
            return _fan_out(job, text)
        return single(job, text)


def resolved(job: JobFields) -> JobFields:
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


def _fan_out(job: JobFields, text: str) -> PipelineJob:
    """Return a pipeline of single-node jobs, each scheduled independently.

    The nodes inherit the pipeline's compute, so that ``create_or_update(job, compute=...)`` applies to them.
    ``force_rerun`` keeps Azure ML from reusing the result of an equal call.
    """
    inputs = inputs_of(job)
    return PipelineJob(
        jobs=fan_out_nodes(job, text, inputs),
        inputs=inputs,
        outputs={name: output or Output() for name, output in outputs_of(job).items() if name in job.outputs},
        compute=job.pools[0].compute if job.pools else str(job.compute or SERVERLESS),
        settings=PipelineJobSettings(continue_on_step_failure=True, force_rerun=True),
        **identification(job),
    )


def shared_outputs(job: JobFields) -> tuple[str, ...]:
    """Return the outputs that several nodes have no common place for, and that they write beside the checkpoints."""
    if job.resources.effective_placement != "fan_out":
        return ()
    names = [name for name, output in job.outputs.items() if field_of(output, "path") is None]
    if not names or job.resources.max_instance_count == 1:
        return ()
    if job.checkpoint.output is None and "://" in str(job.checkpoint.path):
        raise SubmitError(
            f"The output {names[0]!r} is a folder of each node's own, as the nodes of a job with the placement "
            f"'fan_out' are jobs of their own, and checkpoint.path={job.checkpoint.path!r} is no folder that they "
            "could share. Give the output a path, as in Output(type='uri_folder', path='azureml://datastores/...'), or "
            "take the placement 'gang' or 'service'."
        )
    return tuple(names)


def fan_out_nodes(job: JobFields, text: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes by name, which call one component with the inputs of the pipeline that they are in."""
    node = _command(job, text, inputs={name: declaration(value) for name, value in inputs.items()})
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
    _bind_outputs(job, next(iter(children.values())))
    return children


def _bind_outputs(job: JobFields, first: Command) -> None:
    """Make the outputs of the first node those of the pipeline that it is in."""
    for name in job.outputs:
        setattr(first.outputs, name, f"${{{{parent.outputs.{name}}}}}")
    if shared_outputs(job):
        first.environment_variables = {**first.environment_variables, FIRST_NODE: "1"}


def _first_nodes(job: JobFields) -> Iterator[tuple[str, NodePool | None]]:
    stems = step_names(job.pools)
    counts = first_nodes(job.pools, job.resources.max_instance_count) or (job.resources.max_instance_count,)
    for stem, pool, count in zip(stems, job.pools or (None,), counts, strict=True):
        yield from ((f"{stem}_{number}", pool) for number in range(count))


def single(job: JobFields, text: str, *, unset: Collection[str] = ()) -> Command:
    """Return one command job whose nodes the service starts: all at once (gang), or the minimum first (service).

    Args:
        job: job without optional inputs that have no value.
        unset: names of the inputs that may have no value, which a call gives them.
    """
    least, most = job.resources.min_instance_count, job.resources.max_instance_count
    counts = {"instance_count": most}
    if job.resources.effective_placement == "service":
        counts = {"instance_count": least, "max_instance_count": most}
    entity = _command(
        job,
        text,
        inputs=inputs_of(job, unset=unset),
        compute=job.compute,
        # Azure ML starts the command on every node only if there is a distribution.
        distribution=PyTorchDistribution(process_count_per_instance=1) if most > 1 else None,
        services=compile_services(job.services),
        parent_job_name=job.parent_job_name,
        **identification(job),
    )
    entity.resources = _resources(job, None, **counts)
    return entity


def _command(job: JobFields, text: str, **fields: Any) -> Command:
    return command(
        command=text,
        code=checked_code(job.code),
        environment=made_environment(job.environment),
        environment_variables=node_launch.environment_variables(job),
        outputs=outputs_of(job),
        identity=made_identity(job.identity),
        timeout=None if job.timeout is None else math.ceil(job.timeout.total_seconds()),  # Azure ML takes whole seconds
        job_tier=job.job_tier,
        priority=job.priority,
        is_deterministic=False,  # or the result of an equal node of an earlier run would stand for this one's
        **fields,
    )


def identification(job: JobFields) -> dict[str, Any]:
    """Return the fields that name and describe a job."""
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


def inputs_of(job: JobFields, *, unset: Collection[str] = ()) -> dict[str, Any]:
    """Return the inputs of the job: literals, and new ``Input`` objects with a path and a mode.

    Args:
        unset: names of the inputs that may have no value, and are declarations then.
    """
    inputs = {name: made_input(name, value, job.presets, unset=name in unset) for name, value in job.inputs.items()}
    if job.delivery == "ship":
        inputs[node_launch.RUNTIME] = Input(type="uri_file", path=str(stage_runtime()), mode="download")
    return inputs


def has_no_value(value: Any) -> bool:
    """Return whether an input of :func:`inputs_of` is a declaration without a value."""
    return isinstance(value, Input) and value.path is None and value.default is None


def declaration(value: Any) -> Input:
    """Return the declaration of an input in the component: its type and mode, without a value."""
    if isinstance(value, Input):
        return Input(type=value.type, mode=value.mode)
    return Input(type=LITERALS[type(value)])


def outputs_of(job: JobFields) -> dict[str, Any]:
    """Return the outputs of a node of the job: its own, as they were given, and that for checkpoints."""
    outputs: dict[str, Any] = {name: made_output(name, output) for name, output in job.outputs.items()}
    uri = job.checkpoint.output
    if uri is not None:
        outputs[node_launch.CHECKPOINTS] = Output(type="uri_folder", mode="rw_mount", path=uri)
    return outputs
