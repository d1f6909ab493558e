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

_HOMES = {
    **dict.fromkeys(("BatchPolicy", "FixedGlobalBatch", "FixedPerWorkerBatch", "Ramp"), "policies"),
    **dict.fromkeys(("ElasticDistribution", "Framework", "Recovery"), "distribution"),
    **dict.fromkeys(("PLAN_VERSION", "Plan"), "plan"),
    **dict.fromkeys(("Credential", "RendezvousTimings", "TableRendezvous"), "rendezvous"),
    **dict.fromkeys(("ElasticResources", "NodePool", "Placement"), "resources"),
    "CheckpointPolicy": "policies",
    "HealthPolicy": "policies",
    "MetricsPolicy": "policies",
    "PreemptionPolicy": "policies",
    "Presets": "presets",
    "Profile": "policies",
    "ReplacementPolicy": "policies",
}
"""Module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'azureml_elastic.config' has no attribute {name!r}")
    return getattr(importlib.import_module(f"azureml_elastic.config.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
