"""Frozen configuration models shared by submission and nodes: the user's policies, and the plan for the nodes."""

from azureml_elastic.config.batch import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch, Ramp
from azureml_elastic.config.checkpoint import CheckpointPolicy
from azureml_elastic.config.distribution import ElasticDistribution, Framework, HealthPolicy, PreemptionPolicy, Recovery
from azureml_elastic.config.metrics import MetricsPolicy
from azureml_elastic.config.plan import PLAN_VERSION, Plan
from azureml_elastic.config.presets import Presets
from azureml_elastic.config.profile import Profile
from azureml_elastic.config.rendezvous import Credential, RendezvousTimings, TableRendezvous
from azureml_elastic.config.replacement import ReplacementPolicy
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
