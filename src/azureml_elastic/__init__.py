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
        MetricsPolicy,
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
    from azureml_elastic.submit import (
        ElasticCommandJob,
        SubmittedRun,
        load_elastic_job,
        load_elastic_pipeline,
        load_elastic_sweep,
    )

__all__ = [
    "CheckpointPolicy",
    "ElasticCommandJob",
    "ElasticDistribution",
    "ElasticError",
    "ElasticResources",
    "FixedGlobalBatch",
    "FixedPerWorkerBatch",
    "HealthPolicy",
    "MetricsPolicy",
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
    "load_elastic_pipeline",
    "load_elastic_sweep",
    "train",
]

_MODULES = frozenset({"errors", "train"})
_OUTSIDE_CONFIG = {
    "ElasticCommandJob": "submit",
    "ElasticError": "errors",
    "SubmittedRun": "submit",
    "load_elastic_job": "submit",
    "load_elastic_pipeline": "submit",
    "load_elastic_sweep": "submit",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'azureml_elastic' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"azureml_elastic.{name}")
    return getattr(importlib.import_module(f"azureml_elastic.{_OUTSIDE_CONFIG.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return __all__
