"""Conversion of a command job of azure-ai-ml to the fields of an elastic job.

Settings that an elastic job expresses differently (``instance_count``, a ``PyTorchDistribution``, ``torchrun``) are
translated; settings without an equivalent are rejected by name. The given job is not modified. A sweep is
converted to its trial, a command job, and to the options of its search.

Jobs are read by their attributes: azure-ai-ml's own dump of a job has lost local paths and truth values, see
:mod:`azureml_elastic.submit.yaml.entity_document`, and what an elastic job is given must be objects, not their dumps.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.config.resources import ElasticResources
from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.program.translation import Launched, read_launcher, refuse_launcher
from azureml_elastic.submit.expressions import with_literals
from azureml_elastic.submit.fields import given_fields, translated
from azureml_elastic.submit.local_files import SCHEME
from azureml_elastic.submit.sdk_hooks import component_of, fields_of_command, plain_command_job, plain_sweep_job

if TYPE_CHECKING:
    from azure.ai.ml.entities import CommandJob

_SAME = ("name", "description", "display_name", "experiment_name", "compute", "parent_job_name")
FIELDS_OF_COMMAND = frozenset(
    {
        *("name", "description", "tags", "properties", "display_name", "experiment_name", "command", "code"),
        *("environment", "environment_variables", "distribution", "compute", "inputs", "outputs", "instance_count"),
        *("instance_type", "locations", "docker_args", "shm_size", "timeout", "identity", "is_deterministic"),
        *("services", "job_tier", "priority", "parent_job_name"),
    }
)
"""The parameters of ``command()`` that the conversion covers."""

FIELDS_OF_RESOURCES = ("instance_type", "shm_size", "docker_args", "locations", "properties")
"""The fields of ``ElasticResources`` that command jobs have as well."""

_ASSET = re.compile(r"[\w.-]+(?::[\w.-]+|@[\w.-]+)", re.ASCII)
_RESOURCE = re.compile(r"/subscriptions/", re.IGNORECASE)

_SEARCHED = re.compile(r"\$\{\{\s*search_space\.(\w+)\s*\}\}", re.ASCII)
_SAME_OF_SWEEP = ("name", "description", "display_name", "experiment_name", "tags", "properties", "compute", "identity")
_LIMITS = ("max_concurrent_trials", "max_total_trials", "timeout", "trial_timeout")


def fields_of(
    command_job: Any,
    resources: ElasticResources | Mapping[str, Any] | None,
    distribution: ElasticDistribution | Mapping[str, Any] | None,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of the elastic equivalent of a command job.

    The arguments and errors are those of :meth:`~azureml_elastic.submit.job.ElasticCommandJob.from_command`.
    """
    job = plain_command_job(command_job)
    for holder in (command_job, job):
        refuse_unknown(vars(holder), fields_of_command())
    base = Path(getattr(command_job, "base_path", None) or ".")
    fields: dict[str, Any] = {name: getattr(job, name) for name in _SAME if getattr(job, name, None) is not None}
    for name in ("tags", "properties", "environment_variables"):
        fields[name] = {key: str(value) for key, value in (getattr(job, name) or {}).items()}
    for name in ("environment", "identity", "services"):
        if getattr(job, name) is not None:
            fields[name] = copy.deepcopy(getattr(job, name))
    if job.limits is not None and job.limits.timeout is not None:
        fields["timeout"] = job.limits.timeout
    fields |= queue_fields(job.queue_settings)
    fields["inputs"] = {name: _located_input(value, base) for name, value in job.inputs.items() if value is not None}
    fields["outputs"] = {name: copy.deepcopy(value) or {} for name, value in (job.outputs or {}).items()}
    code_base = base
    if (component := component_of(command_job)) is not None:
        _complete(fields, component)
        code_base = Path(component.base_path or base)  # it may have been loaded from a file in another folder
    if job.code is not None:
        fields["code"] = located(str(job.code), code_base)
    launched = Launched(str(job.command or ""))
    if "command" not in changes:
        launched = _without_launcher(launched.command, fields["inputs"], distribution)
        fields["command"] = launched.command
    if "environment" not in fields and "environment" not in changes:
        raise SubmitError("The command job has no environment. Give from_command(..., environment='<name>@latest').")
    return {
        **fields,
        "resources": _resources(job.resources, resources),
        "distribution": _distribution(job.distribution, launched)
        if distribution is None
        else _completed(distribution, launched),
        **changes,
    }


def _complete(fields: dict[str, Any], component: Any) -> None:
    """Add to a job's fields what only the component that it calls has: environment, variables, defaults, outputs."""
    if "environment" not in fields and component.environment is not None:
        fields["environment"] = copy.deepcopy(component.environment)
    variables = getattr(component, "environment_variables", None) or {}
    fields["environment_variables"] = {
        **{key: str(value) for key, value in variables.items()},
        **fields["environment_variables"],
    }
    for name, declared in component.inputs.items():
        if name not in fields["inputs"] and (default := getattr(declared, "default", None)) is not None:
            fields["inputs"][name] = default
    for name, declared in component.outputs.items():
        fields["outputs"].setdefault(name, {"type": declared.type})


def refuse_unknown(held: Mapping[str, Any], names: Collection[str]) -> None:
    """Check that a job sets no parameter that a newer azure-ai-ml has added."""
    for name in sorted(set(names) - FIELDS_OF_COMMAND):
        value = held.get(name, held.get(f"_{name}"))
        if value is not None:
            raise SubmitError(
                f"{name}={value!r} cannot be carried: this release of azureml-elastic does not know the field, which "
                "azure-ai-ml has added since. Leave it out, or install a newer azureml-elastic."
            )


def _without_launcher(
    command: str, inputs: Mapping[str, Any], distribution: ElasticDistribution | Mapping[str, Any] | None
) -> Launched:
    literals = partial(with_literals, inputs=inputs)
    launched = read_launcher(command, literals)
    if launched is None:
        return Launched(command)
    if launched.refused:
        given = ElasticDistribution.model_validate(translated(distribution or {}))
        refuse_launcher(command, given, literals)
    return launched


def _completed(given: ElasticDistribution | Mapping[str, Any], launcher: Launched) -> ElasticDistribution:
    distribution = ElasticDistribution.model_validate(translated(given))
    fields = given_fields(distribution)
    count, launched = (each.get("process_count_per_instance") for each in (fields, launcher.fields))
    if count is not None and launched is not None and count != launched:
        raise SubmitError(
            f"distribution= starts {count!r} workers on each node, and the launcher in the command {launched!r}. Give "
            f"distribution=ElasticDistribution(process_count_per_instance={launched!r}), or change the launcher."
        )
    return ElasticDistribution.model_validate({**launcher.all_fields, **fields})


def queue_fields(settings: Any) -> dict[str, str]:
    """Return the queue settings in an elastic job's spelling; azure-ai-ml accepts any case."""
    fields: dict[str, str] = {}
    # azure-ai-ml has a tier of the name 'null' for none.
    if settings is not None and settings.job_tier and settings.job_tier.lower() != "null":
        fields["job_tier"] = settings.job_tier.capitalize()
    if settings is not None and settings.priority:
        fields["priority"] = settings.priority.lower()
    return fields


def _resources(held: Any, given: ElasticResources | Mapping[str, Any] | None) -> ElasticResources:
    count = getattr(held, "instance_count", None) or 1
    most = getattr(held, "max_instance_count", None) or count
    if given is not None:
        counts = given if isinstance(given, ElasticResources) else ElasticResources.model_validate(given)
    elif most > count:
        counts = ElasticResources(min_instance_count=count, max_instance_count=most)
    elif count > 1:
        counts = ElasticResources(max_instance_count=count)
    else:
        raise SubmitError(
            f"The command job has instance_count={count}, which does not determine a maximum for an elastic job. Give "
            "from_command(..., resources=ElasticResources(max_instance_count=...))."
        )
    kept = {
        name: copy.deepcopy(value)
        for name in FIELDS_OF_RESOURCES
        if getattr(counts, name) is None and (value := getattr(held, name, None))
    }
    return ElasticResources.model_validate({**dict(counts), **kept})


def _distribution(held: Any, launcher: Launched) -> ElasticDistribution:
    if held is None:
        return ElasticDistribution(**launcher.all_fields)
    fields = translated(held)
    if "framework" in fields:
        return ElasticDistribution(**fields)
    count = fields["process_count_per_instance"]
    launched = launcher.all_fields.get("process_count_per_instance", 1)
    if count > 1 and launched not in {1, count}:
        raise SubmitError(
            f"The job's distribution starts {count} processes on each node, and the launcher in its command "
            f"{launched!r} in each of them. Give the number of workers per node: "
            "from_command(..., distribution=ElasticDistribution(process_count_per_instance=...))."
        )
    return ElasticDistribution(
        **{**launcher.fields, "process_count_per_instance": count if launched == 1 else launched}
    )


def _located_input(value: Any, base: Path) -> Any:
    copied = copy.deepcopy(value)
    if getattr(value, "path", None) is not None:
        copied.path = located(str(value.path), base)
    return copied


def located(path: str, base: Path) -> str:
    """Return a path or address that does not depend on the current folder: absolute, or with its scheme.

    azure-ai-ml removes ``azureml:`` from the names of assets when it reads YAML, leaving ``name:version``.
    """
    if _RESOURCE.match(path):
        return f"azureml:{path}"
    # A file may be named as an asset is, such as 'data:1'.
    if _ASSET.fullmatch(path) and not path.startswith(("azureml:", "file:")) and not (base / path).exists():
        return f"azureml:{path}"
    if SCHEME.match(path) or Path(path).is_absolute():
        return path
    # Without normalization, azure-ai-ml would name an asset '..' after such a folder.
    return os.path.normpath((base / path).absolute())


@dataclass(frozen=True)
class Trial:
    """What a sweep runs, and how it searches.

    Args:
        command_job: job of a trial, whose inputs are those of the sweep and its search expressions.
        options: arguments of azure-ai-ml's ``Command.sweep``, without the search space.
    """

    command_job: CommandJob
    options: dict[str, Any]


def is_sweep(job: Any) -> bool:
    """Return whether a job of azure-ai-ml is a sweep."""
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.entities import Sweep
        from azure.ai.ml.sweep import SweepJob
    return isinstance(job, (Sweep, SweepJob))


def trial_of(sweep: Any) -> Trial:
    """Return the trial of a sweep, which is not modified.

    Raises:
        SubmitError: the sweep was submitted already, or calls a registered component, whose command is unknown.
        MissingExtra: azure-ai-ml is not installed.
    """
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.entities import CommandJob
    job = plain_sweep_job(sweep)
    trial: Any = job.trial
    command_job = CommandJob(
        command=_SEARCHED.sub(r"${{inputs.\1}}", str(trial.command or "")),
        code=trial.code,
        environment=trial.environment,
        environment_variables=dict(trial.environment_variables or {}),
        distribution=trial.distribution,
        resources=job.resources or trial.resources,
        inputs={**(job.inputs or {}), **(job.search_space or {})},
        outputs=job.outputs,
        queue_settings=job.queue_settings,
        base_path=getattr(trial, "base_path", None) or job.base_path,
        **{name: getattr(job, name) for name in _SAME_OF_SWEEP if getattr(job, name, None) is not None},
    )
    options = {name: value for name in _LIMITS if (value := getattr(job.limits, name, None)) is not None}
    if job.early_termination is not None:
        options["early_termination_policy"] = job.early_termination
    if job.objective is not None:
        options |= {"primary_metric": job.objective.primary_metric, "goal": job.objective.goal}
    return Trial(command_job, {**options, "sampling_algorithm": job.sampling_algorithm or "random"})
