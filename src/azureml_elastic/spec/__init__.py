"""The frozen models that both sides share: what a user asks for, and the plan that the nodes receive."""

from azureml_elastic.spec.batch import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch, Ramp
from azureml_elastic.spec.checkpoint import CheckpointPolicy
from azureml_elastic.spec.distribution import ElasticDistribution, Recovery
from azureml_elastic.spec.health import HealthPolicy
from azureml_elastic.spec.plan import PLAN_VERSION, Plan
from azureml_elastic.spec.pools import NodePool
from azureml_elastic.spec.preemption import PreemptionPolicy
from azureml_elastic.spec.presets import Presets
from azureml_elastic.spec.profile import Profile
from azureml_elastic.spec.rendezvous import Credential, RendezvousTimings, TableRendezvous
from azureml_elastic.spec.resources import ElasticResources, Placement
from azureml_elastic.spec.supervision import SupervisionPolicy

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
