"""Sweeps of elastic jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit import node_launch
from azureml_elastic.submit.bindings import Bound, bindings_of
from azureml_elastic.submit.compilation import identification, resolved, single
from azureml_elastic.submit.fields import JobFields
from azureml_elastic.submit.sdk_hooks import outside_pipelines, position_in_pipelines
from azureml_elastic.submit.validation import check

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml.entities import Sweep

__all__ = ["compile_sweep"]


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
    job = resolved(job)
    text = node_launch.command_text(job, check(job))
    unset = search if position_in_pipelines() is None else job.inputs
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
