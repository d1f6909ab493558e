"""The frozen models that both sides share: what a user asks for, and the plan that the nodes receive."""

from azureml_elastic.spec.checkpoint import CheckpointPolicy
from azureml_elastic.spec.distribution import ElasticDistribution, Recovery
from azureml_elastic.spec.health import HealthPolicy
from azureml_elastic.spec.plan import PLAN_VERSION, Plan
from azureml_elastic.spec.preemption import PreemptionPolicy
from azureml_elastic.spec.rendezvous import Credential, RendezvousTimings, TableRendezvous
from azureml_elastic.spec.resources import ElasticResources, Placement

__all__ = [
    "PLAN_VERSION",
    "CheckpointPolicy",
    "Credential",
    "ElasticDistribution",
    "ElasticResources",
    "HealthPolicy",
    "Placement",
    "Plan",
    "PreemptionPolicy",
    "Recovery",
    "RendezvousTimings",
    "TableRendezvous",
]
