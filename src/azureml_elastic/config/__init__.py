"""The frozen models that both sides share: what a user asks for, and the plan that the nodes receive."""

from azureml_elastic.config.batch import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch, Ramp
from azureml_elastic.config.checkpoint import CheckpointPolicy
from azureml_elastic.config.distribution import ElasticDistribution, Recovery
from azureml_elastic.config.health import HealthPolicy
from azureml_elastic.config.plan import PLAN_VERSION, Plan
from azureml_elastic.config.pools import NodePool
from azureml_elastic.config.preemption import PreemptionPolicy
from azureml_elastic.config.presets import Presets
from azureml_elastic.config.profile import Profile
from azureml_elastic.config.rendezvous import Credential, RendezvousTimings, TableRendezvous
from azureml_elastic.config.replacement import SupervisionPolicy
from azureml_elastic.config.resources import ElasticResources, Placement

__all__ = [
    "PLAN_VERSION",
    "BatchPolicy",
    "CheckpointPolicy",
    "Credential",
    "ElasticDistribution",
    "ElasticResources",
    "FixedGlobalBatch",
    "FixedPerWorkerBatch",
    "HealthPolicy",
    "NodePool",
    "Placement",
    "Plan",
    "PreemptionPolicy",
    "Presets",
    "Profile",
    "Ramp",
    "Recovery",
    "RendezvousTimings",
    "SupervisionPolicy",
    "TableRendezvous",
]
