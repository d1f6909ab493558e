"""The plan: the document that the submission passes to the nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel
from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.config.policies import (
    BatchPolicy,
    CheckpointPolicy,
    FixedGlobalBatch,
    HealthPolicy,
    MetricsPolicy,
    PreemptionPolicy,
    Profile,
    ReplacementPolicy,
)
from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.config.resources import ElasticResources, NodePool
from azureml_elastic.environment import names as environment
from azureml_elastic.errors import PlanError

PLAN_VERSION = 1


class EarlierRun(ConfigModel):
    """The run that another run continues.

    Args:
        name: its name, by which its rows in the table are found.
        path: folder or URL of its checkpoints; ``None`` for the folder of its name beside that of the new run, which
            the node completes.
        checkpoint: reference to its last committed checkpoint; ``None`` for the one that its table or the folder names.
    """

    name: str
    path: str | None = None
    checkpoint: Mapping[str, Any] | None = None


class SubmittedNames(ConfigModel):
    """What the submission itself named in the job, which tells it from what Azure ML adds to the job's document.

    Ids of code, component and environment do not exist when the plan is written, so that it cannot hold the document.

    Args:
        outputs: names of the outputs that were given a path.
        own_outputs: names of the outputs without a path, which are a separate folder for each job.
        properties: names of the run's properties.
        resources: names of the fields of ``resources`` beside the numbers of nodes.
        services: names of the interactive services.
        tags: names of the run's tags.
    """

    outputs: tuple[str, ...] = ()
    own_outputs: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


class Plan(ConfigModel):
    """The configuration of a run that its nodes receive. It contains no secrets.

    Args:
        version: version of the document; nodes reject unknown versions.
        resources: minimum and maximum number of nodes.
        distribution: configuration of the processes.
        checkpoint: checkpoint policy.
        batch: policy for batch size and learning rate when the world size changes.
        preemption: detection of and response to preemption notices.
        health: checks of nodes before they join, detection of hangs, and quarantine of hosts with repeated failures.
        rendezvous: table through which the nodes find each other.
        metrics: where the run's metrics are published.
        pools: node pools in the order of preference; empty if all nodes have one compute.
        replacement: policy for replacing lost nodes; ``None`` disables replacement.
        name: name of the run, which identifies it in the table; ``None`` selects Azure ML's name, which is new for
            each submission, see :meth:`run_id_of`.
        program: digest of what the job runs, by which the nodes of another program with the same run id are refused;
            ``None`` accepts all nodes.
        resume_from: earlier run that this run continues as long as it has no checkpoint of its own; ``None`` for none.
        submitted: names in the submitted job, from which jobs that replace nodes are derived.
        audit: whether workers record the samples of each step, to verify that each was trained exactly once.
        profile: steps and ranks that PyTorch's profiler records; ``None`` disables it.
    """

    version: Literal[1] = Field(default=1)
    resources: ElasticResources
    distribution: ElasticDistribution = ElasticDistribution()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    batch: BatchPolicy = FixedGlobalBatch()
    preemption: PreemptionPolicy = PreemptionPolicy()
    health: HealthPolicy = HealthPolicy()
    rendezvous: TableRendezvous = TableRendezvous()
    metrics: MetricsPolicy = MetricsPolicy()
    pools: tuple[NodePool, ...] = ()
    replacement: ReplacementPolicy | None = None
    name: str | None = None
    program: str | None = None
    resume_from: EarlierRun | None = None
    submitted: SubmittedNames = SubmittedNames()
    audit: bool = False
    profile: Profile | None = None

    @model_validator(mode="after")
    def _policies_agree(self) -> Self:
        self.distribution.node_limits(self.resources.min_instance_count, self.resources.max_instance_count)
        self.distribution.check_ports(self.rendezvous.port_range)
        return self

    def to_json(self) -> str:
        """Return the plan as one line of JSON with sorted keys, so that equal plans have equal texts."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def run_id_of(self, variables: Mapping[str, str], *, job: str | None, root: str | None) -> str | None:
        """Return the identifier of the run in the table.

        Nodes that share a job have its id, whatever pipeline or sweep it is a part of. Nodes that are jobs of their own
        share the id of their pipeline alone, and the name of the step if that pipeline has several elastic steps. No id
        is written into the job, which a schedule submits again and again.

        Args:
            variables: environment variables of the nodes.
            job: id of the job that a node belongs to.
            root: id of the outermost job.
        """
        if given := self.name or variables.get(environment.RUN_ID):
            return given
        if self.resources.effective_placement != "fan_out":
            return job or root
        step = variables.get(environment.STEP)
        name = root or job
        return f"{name}-{step}" if name and step else name

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse the result of :meth:`to_json`.

        Raises:
            PlanError: the text is no JSON object, has an unknown version, or has invalid fields.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise PlanError(f"The plan is not JSON ({error}). Submit the job again with this release.") from error
        if not isinstance(document, dict):
            raise PlanError(f"The plan is a JSON {type(document).__name__}, not an object. Submit the job again.")
        version = document.get("version")
        if version != PLAN_VERSION:
            raise PlanError(
                f"The plan has version {version!r}; this release of azureml-elastic reads version {PLAN_VERSION}. "
                "Install the release on the nodes that submitted the job, or submit it again."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise PlanError(f"The plan has wrong fields: {error}") from error
