"""Frozen configuration models shared by submission and nodes: the user's policies, and the plan for the nodes.

Names are imported when they are used: the models need pydantic, whose import takes longer than a node may wait before
it starts its preload server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from azureml_elastic.config.distribution import ElasticDistribution, Framework, Recovery
    from azureml_elastic.config.plan import PLAN_VERSION, Plan
    from azureml_elastic.config.policies import (
        BatchPolicy,
        CheckpointPolicy,
        FixedGlobalBatch,
        FixedPerWorkerBatch,
        HealthPolicy,
        MetricsPolicy,
        PreemptionPolicy,
        Profile,
        Ramp,
        ReplacementPolicy,
    )
    from azureml_elastic.config.presets import Presets
    from azureml_elastic.config.rendezvous import Credential, RendezvousTimings, TableRendezvous
    from azureml_elastic.config.resources import ElasticResources, NodePool, Placement

__all__ = [
    "PLAN_VERSION",
    "BatchPolicy",
    "CheckpointPolicy",
    "Credential",
    "ElasticDistribution",
    "ElasticResources",
    "FixedGlobalBatch",
    "FixedPerWorkerBatch",
    "Framework",
    "HealthPolicy",
    "MetricsPolicy",
    "NodePool",
    "Placement",
    "Plan",
    "PreemptionPolicy",
    "Presets",
    "Profile",
    "Ramp",
    "Recovery",
    "RendezvousTimings",
    "ReplacementPolicy",
    "TableRendezvous",
]

_MODULES = ("policies", "distribution", "resources", "rendezvous", "plan", "presets")


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        home = importlib.import_module(f"azureml_elastic.config.{module}")
        if hasattr(home, name):
            return getattr(home, name)
    raise AttributeError(f"module 'azureml_elastic.config' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
