"""Submission of elastic jobs through azure-ai-ml.

``ElasticCommandJob`` is imported on first access, which also registers it with azure-ai-ml, so that
``ml_client.jobs.create_or_update(job)`` and ``ml_client.create_or_update(job)`` accept it. The model itself, in
:mod:`azureml_elastic.submit.job`, does not need azure-ai-ml until the job is compiled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob
    from azureml_elastic.submit.submitted import SubmittedRun
    from azureml_elastic.submit.yaml.job_file import load_elastic_job, load_elastic_sweep
    from azureml_elastic.submit.yaml.pipeline_file import load_elastic_pipeline

__all__ = ["ElasticCommandJob", "SubmittedRun", "load_elastic_job", "load_elastic_pipeline", "load_elastic_sweep"]

_HOMES = {
    "SubmittedRun": "submitted",
    "load_elastic_job": "yaml.job_file",
    "load_elastic_pipeline": "yaml.pipeline_file",
    "load_elastic_sweep": "yaml.job_file",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"azureml_elastic.submit.{_HOMES[name]}"), name)
    if name != "ElasticCommandJob":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from azureml_elastic.submit import job, sdk_hooks

    sdk_hooks.register(job.ElasticCommandJob)
    globals()[name] = job.ElasticCommandJob
    return job.ElasticCommandJob


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
