"""What is refused before anything is uploaded, with the next step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.config import environment as variables
from azureml_elastic.config.command.program import FoundProgram, find_program, parse_program
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit.launchers import refuse_launcher
from azureml_elastic.submit.pools import check_pools

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

__all__ = ["RESERVED_PREFIX", "check"]

RESERVED_PREFIX = "azureml_elastic_"
"""Inputs and outputs whose names begin with it are ours."""

_OUR_VARIABLES = frozenset(
    getattr(variables, name) for name in variables.__all__ if getattr(variables, name) != variables.RUN_ID
)
_REMOTE = re.compile(r"[A-Za-z][\w+.-]+:", re.ASCII)  # a scheme; one letter is a drive of Windows
_CHANGES_FOLDER = re.compile(r"(?:^|[\s;&|(])(?:cd|pushd)\s")


def check(job: ElasticCommandJob) -> FoundProgram:
    """Return where the job's program stands in its command.

    Args:
        job: the job, whose fields are each valid.

    Raises:
        SubmitError: fields of the job contradict each other.
        CommandError: the command starts no Python program, or one that is not in ``code``.
    """
    _check_names(job)
    _check_paths_on_compute(job)
    _check_limits_of_inputs(job)
    _check_placement(job)
    _check_docker_args(job)
    check_pools(job)
    if job.resources.effective_placement == "fan_out":
        _check_fan_out(job)
    refuse_launcher(job.command)
    found = find_program(job.command)
    _check_script(job, found)
    return found


def _check_names(job: ElasticCommandJob) -> None:
    for kind, names in (("input", job.inputs), ("output", job.outputs)):
        taken = sorted(name for name in names if name.startswith(RESERVED_PREFIX))
        if taken:
            raise SubmitError(
                f"The {kind} {taken[0]!r} begins with {RESERVED_PREFIX!r}, which is kept for the inputs and outputs "
                f"that this library adds to the job. Rename the {kind}."
            )
    taken = sorted(_OUR_VARIABLES & set(job.environment_variables))
    if taken:
        raise SubmitError(
            f"The environment variable {taken[0]} is set by this library on the nodes. Remove it from "
            "environment_variables; what it tells the nodes is said by resources, distribution and checkpoint."
        )


def _check_paths_on_compute(job: ElasticCommandJob) -> None:
    for kind, values in (("input", job.inputs), ("output", job.outputs)):
        for name, value in values.items():
            path = _said(value, "path_on_compute")
            if path is not None:
                does = "drops it in silence" if kind == "output" else "cannot submit a job with it"
                raise SubmitError(
                    f"The {kind} {name!r} has path_on_compute={path!r}, but azure-ai-ml {does}, with any placement. "
                    f"Leave it out, and take the folder that ${{{{{kind}s.{name}}}}} names in the command."
                )


def _check_limits_of_inputs(job: ElasticCommandJob) -> None:
    """Check literals against what their own declaration allows: azure-ai-ml sends the value alone."""
    for name, value in job.inputs.items():
        given, choices = _said(value, "default"), _said(value, "enum")
        least, most = _said(value, "min"), _said(value, "max")
        if given is None:
            continue
        if choices and given not in choices:
            raise SubmitError(f"The value of the input {name!r} is not in its enum {list(choices)}. Give one of these.")
        if (least is not None and given < least) or (most is not None and given > most):
            limits = " and ".join(f"{word} {one}" for word, one in (("min", least), ("max", most)) if one is not None)
            raise SubmitError(f"The value of the input {name!r}, {given}, is beyond its {limits}. Correct one of them.")


def _said(value: Any, name: str) -> Any:
    """Return a field of an ``Input`` or ``Output``, or of their fields as a dictionary."""
    return value.get(name) if type(value) is dict else getattr(value, name, None)


def _check_placement(job: ElasticCommandJob) -> None:
    resources = job.resources
    if job.compute is None and resources.instance_type is None and job.job_tier is None:
        raise SubmitError(
            f"The job names no compute for its {resources.max_instance_count} node(s). Give compute='<cluster>', or, "
            "for serverless compute, resources.instance_type='<VM size>' (with job_tier='Spot' for spot machines)."
        )
    if job.compute == "local":  # a pool refuses that itself
        raise SubmitError(
            "compute='local' would run a single node in a container of this machine. To try the job here, run "
            "'azureml-elastic local'; to submit it, give the name of a cluster."
        )


def _check_docker_args(job: ElasticCommandJob) -> None:
    resources = job.resources
    if resources.docker_args is None or isinstance(resources.docker_args, str):
        return
    said = "docker_args is a list, and with a list azure-ai-ml drops"
    if resources.effective_placement == "service":
        raise SubmitError(
            f"{said} the max_instance_count that the placement 'service' rests on. Give one string, "
            "docker_args=shlex.join([...]), or take the placement 'fan_out'."
        )
    if resources.locations is not None:
        raise SubmitError(
            f"{said} locations={list(resources.locations)!r}. Give one string, docker_args=shlex.join([...])."
        )


def _check_fan_out(job: ElasticCommandJob) -> None:
    if job.parent_job_name is not None:
        raise SubmitError(
            f"parent_job_name={job.parent_job_name!r} cannot be carried by the placement 'fan_out', whose nodes have "
            "the pipeline as their parent. Leave it out, or take the placement 'gang' or 'service'."
        )
    for name, output in job.outputs.items():
        version = output.get("version") if isinstance(output, dict) else getattr(output, "version", None)
        if version is not None and job.resources.max_instance_count > 1:
            raise SubmitError(
                f"The output {name!r} registers version={version!r}, but with the placement 'fan_out' each of "
                f"{job.resources.max_instance_count} nodes would register it. Leave the version out, and each node "
                "registers one of its own, or take the placement 'gang' or 'service'."
            )


def _check_script(job: ElasticCommandJob, found: FoundProgram) -> None:
    program = parse_program([found.program])
    if job.code is None or _REMOTE.match(str(job.code)):
        return
    code = Path(job.code)
    if not code.exists():
        raise SubmitError(
            f"code={str(job.code)!r} does not exist (looked for {code.absolute()}). Give the folder that holds the "
            "script, or code=None where the script is in the environment."
        )
    folder = code if code.is_dir() else code.parent
    target = program.target
    if program.kind == "module" or "$" in target or target.startswith(("/", "~")):
        return
    if _CHANGES_FOLDER.search(found.before) or (folder / target).exists():
        return
    raise CommandError(
        f"The command starts {target!r}, which is not in code={str(job.code)!r} (looked for "
        f"{(folder / target).absolute()}). Correct the script's path, which is relative to the code folder, or code."
    )
