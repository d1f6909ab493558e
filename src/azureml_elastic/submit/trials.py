"""Conversion of a sweep of azure-ai-ml to its trial, a command job, and to the options of its search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import needs_extra
from azureml_elastic.submit.sdk_hooks import plain_sweep_job

if TYPE_CHECKING:
    from azure.ai.ml.entities import CommandJob

__all__ = ["Trial", "is_sweep", "trial_of"]

_SEARCHED = re.compile(r"\$\{\{\s*search_space\.(\w+)\s*\}\}", re.ASCII)
_SAME = ("name", "description", "display_name", "experiment_name", "tags", "properties", "compute", "identity")
_LIMITS = ("max_concurrent_trials", "max_total_trials", "timeout", "trial_timeout")


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
        **{name: getattr(job, name) for name in _SAME if getattr(job, name, None) is not None},
    )
    options = {name: value for name in _LIMITS if (value := getattr(job.limits, name, None)) is not None}
    if job.early_termination is not None:
        options["early_termination_policy"] = job.early_termination
    if job.objective is not None:
        options |= {"primary_metric": job.objective.primary_metric, "goal": job.objective.goal}
    return Trial(command_job, {**options, "sampling_algorithm": job.sampling_algorithm or "random"})
