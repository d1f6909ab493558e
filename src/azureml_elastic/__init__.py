"""Elastic, preemption-proof distributed PyTorch jobs on Azure Machine Learning.

Names are imported when they are used: a notebook needs the extra ``submit``, a node the extra ``node``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from azureml_elastic import errors, train
    from azureml_elastic.config import (
        CheckpointPolicy,
        ElasticDistribution,
        ElasticResources,
        FixedGlobalBatch,
        FixedPerWorkerBatch,
        HealthPolicy,
        NodePool,
        Plan,
        PreemptionPolicy,
        Presets,
        Profile,
        Ramp,
        RendezvousTimings,
        ReplacementPolicy,
        TableRendezvous,
    )
    from azureml_elastic.errors import ElasticError
    from azureml_elastic.submit import ElasticCommandJob, SubmittedRun, load_elastic_job

__all__ = [
    "CheckpointPolicy",
    "ElasticCommandJob",
    "ElasticDistribution",
    "ElasticError",
    "ElasticResources",
    "FixedGlobalBatch",
    "FixedPerWorkerBatch",
    "HealthPolicy",
    "NodePool",
    "Plan",
    "PreemptionPolicy",
    "Presets",
    "Profile",
    "Ramp",
    "RendezvousTimings",
    "ReplacementPolicy",
    "SubmittedRun",
    "TableRendezvous",
    "errors",
    "load_elastic_job",
    "train",
]

_HOMES = {
    "CheckpointPolicy": "config",
    "ElasticCommandJob": "submit",
    "ElasticDistribution": "config",
    "ElasticError": "errors",
    "ElasticResources": "config",
    "FixedGlobalBatch": "config",
    "FixedPerWorkerBatch": "config",
    "HealthPolicy": "config",
    "NodePool": "config",
    "Plan": "config",
    "PreemptionPolicy": "config",
    "Presets": "config",
    "Profile": "config",
    "Ramp": "config",
    "RendezvousTimings": "config",
    "SubmittedRun": "submit",
    "ReplacementPolicy": "config",
    "TableRendezvous": "config",
    "load_elastic_job": "submit",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"azureml_elastic.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"azureml_elastic.{name}")
    raise AttributeError(f"module 'azureml_elastic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
