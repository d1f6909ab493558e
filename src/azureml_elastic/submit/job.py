"""The job as its author writes it: a frozen model that compiles to entities of azure-ai-ml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, PositiveDuration
from azureml_elastic.config.batch import BatchPolicy, FixedGlobalBatch
from azureml_elastic.config.checkpoint import CheckpointPolicy
from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.config.plan import Plan
from azureml_elastic.config.presets import Presets
from azureml_elastic.config.replacement import ReplacementPolicy
from azureml_elastic.config.resources import ElasticResources, NodePool
from azureml_elastic.submit.sdk_hooks import Submittable

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command, CommandJob, PipelineJob

__all__ = ["ElasticCommandJob"]


_ELSEWHERE = {
    "docker_args": "give resources=ElasticResources(docker_args=...)",
    "instance_count": "give resources=ElasticResources(min_instance_count=..., max_instance_count=...)",
    "instance_type": "give resources=ElasticResources(instance_type=...)",
    "is_deterministic": "nothing is ever answered from an earlier run; leave it out",
    "limits": "give timeout=...",
    "locations": "give resources=ElasticResources(locations=...)",
    "queue_settings": "give job_tier=... and priority=...",
    "shm_size": "give resources=ElasticResources(shm_size=...)",
}
"""Fields of azure-ai-ml's command jobs that an elastic job has in another place."""


_OF_THE_SUBMISSION = ("docker_args", "instance_type", "locations", "properties", "shm_size")
"""Resources that are nothing to the nodes."""

_WITHOUT: Any = None
"""What ``resources`` has where it was not given: pools say it, or it is refused."""


class ElasticCommandJob(ConfigModel, Submittable):
    """A command job of Azure ML that starts small, grows, and survives the loss of any node.

    The fields are those of ``azure.ai.ml.command()``; objects of azure-ai-ml are held as they are and never
    changed. The job itself is data: submit it as often as you like, each time is a run of its own.

    Args:
        command: shell commands of which exactly one starts a Python program, as in
            ``"pip install -r requirements.txt && python train.py --data ${{inputs.data}}"``.
        environment: the name of a registered environment, or an ``Environment``.
        resources: how many nodes, and of which kind. May be left out with pools: training then needs their floors, one
            node at least, and takes all that they may give.
        code: the local folder with the script, or a remote one that azure-ai-ml knows how to take.
        compute: the cluster's name; ``None`` for serverless compute; or :class:`NodePool` objects in the order of
            preference, as in ``[NodePool("spot", max_instance_count=6), NodePool("dedicated", max_instance_count=2)]``.
        inputs: literals, ``Input`` objects or their fields as a dictionary.
        outputs: ``Output`` objects or their fields. With ``fan_out`` an output without a path is a folder of
            its own for each node.
        environment_variables: for every process of the job.
        distribution: the processes on the nodes.
        checkpoint: the checkpoints; without a path they go to the workspace's default blob store.
        replacement: how lost nodes are replaced; ``None`` for not at all.
        batch: what becomes of batch and learning rate when the number of processes changes.
        presets: what is set for network, mounts, data and profiler beside what the job itself says.
        name: of the run; ``None`` lets azure-ai-ml make a new one for each submission.
        display_name: of the run, in the studio.
        experiment_name: the experiment; ``None`` takes the current folder's name, as azure-ai-ml does.
        description: of the run.
        tags: of the run.
        properties: of the run.
        identity: ``UserIdentityConfiguration`` or another, with which the nodes reach data and table.
        timeout: after which Azure ML cancels a node's job.
        services: interactive services, such as ``JupyterLabJobService``. With ``fan_out`` each node has its own;
            TensorBoard is on node 0 unless it has ``nodes="all"``.
        job_tier: of serverless compute: ``"Spot"``, ``"Basic"``, ``"Standard"``, ``"Premium"``.
        priority: in the compute's queue.
        parent_job_name: the job below which Azure ML shows this one; not with ``fan_out``.
        delivery: ``"ship"`` sends this library along and adds what the environment lacks; ``"environment"``
            takes the library that the environment has.
        audit: whether workers write down the samples of each step.
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # pydantic would show values of environment variables

    type: Literal["elastic_command"] = "elastic_command"
    command: str
    environment: Any = Field(repr=False)
    resources: ElasticResources = Field(default=_WITHOUT)
    code: str | os.PathLike[str] | None = None
    compute: str | tuple[NodePool, ...] | None = None
    inputs: Mapping[str, Any] = {}
    outputs: Mapping[str, Any] = {}
    environment_variables: Mapping[str, str] = Field(default={}, repr=False)
    distribution: ElasticDistribution = ElasticDistribution()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    replacement: ReplacementPolicy | None = ReplacementPolicy()
    batch: BatchPolicy = FixedGlobalBatch()
    presets: Presets = Presets()
    name: str | None = None
    display_name: str | None = None
    experiment_name: str | None = None
    description: str | None = None
    tags: Mapping[str, str] = {}
    properties: Mapping[str, str] = {}
    identity: Any = None
    timeout: PositiveDuration | None = None
    services: Mapping[str, Any] | None = None
    job_tier: Literal["Spot", "Basic", "Standard", "Premium"] | None = None
    priority: Literal["low", "medium", "high"] | None = None
    parent_job_name: str | None = None
    delivery: Literal["ship", "environment"] = "ship"
    audit: bool = False

    @model_validator(mode="before")
    @classmethod
    def _says_it_elsewhere(cls, fields: Any) -> Any:
        said = sorted(_ELSEWHERE.keys() & fields.keys()) if isinstance(fields, dict) else []
        if said:
            raise ValueError(
                f"{said[0]} is no field of an elastic job: {_ELSEWHERE[said[0]]} "
                "(ElasticCommandJob.from_command() translates a job of azure-ai-ml)"
            )
        return fields

    @model_validator(mode="before")
    @classmethod
    def _counts_of_pools(cls, fields: Any) -> Any:
        """Take the node counts from the pools where nobody has given them; each node of a pool is a job of its own."""
        compute = fields.get("compute") if isinstance(fields, dict) else None
        if compute is None or isinstance(compute, str):
            return fields
        given = fields.get("resources")
        try:
            pools = TypeAdapter(tuple[NodePool, ...]).validate_python(compute)
            resources = None if given is None else ElasticResources.model_validate(given)
        except ValidationError:  # what is wrong is refused by its name
            return fields if given is not None else {**fields, "resources": ElasticResources(max_instance_count=1)}
        if not pools:
            raise ValueError("compute=[] has no pool; give at least one NodePool, or the name of a cluster")
        if resources is None:
            least = max(1, sum(pool.min_instance_count for pool in pools))
            most = sum(pool.max_instance_count for pool in pools)
            resources = ElasticResources(min_instance_count=least, max_instance_count=most)
        if resources.placement is None:
            resources = resources.model_copy(update={"placement": "fan_out"})
        return {**fields, "compute": pools, "resources": resources}

    @field_validator("distribution", "resources", "checkpoint", mode="before")
    @classmethod
    def _is_ours(cls, value: Any, info: Any) -> Any:
        ours = cls.model_fields[info.field_name].annotation
        if isinstance(ours, type) and not (isinstance(value, ours) or type(value) is dict):
            raise ValueError(
                f"{info.field_name}={value!r} is a {type(value).__name__}; an elastic job takes an {ours.__name__}, "
                f"from azureml_elastic import {ours.__name__}"
            )
        return value

    @classmethod
    def from_command(
        cls,
        command_job: Command | CommandJob,
        *,
        resources: ElasticResources | Mapping[str, Any] | None = None,
        distribution: ElasticDistribution | Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Self:
        """Return the elastic job that does what a command job of azure-ai-ml does; the given one is not changed.

        A launcher in the command (``torchrun``, ``python -m torch.distributed.run``) and a ``PyTorchDistribution``
        become the distribution. What an elastic job cannot carry is refused by name.

        Args:
            command_job: what ``command(...)`` or ``load_job("job.yml")`` returned.
            resources: the nodes; what it leaves open (VM size, ``shm_size``, ...) is taken from the job. ``None``
                makes a job of ``instance_count`` > 1 an elastic one of 1 to ``instance_count`` nodes.
            distribution: the processes, in place of what the job says.
            **changes: fields of the elastic job, before those of the given one.

        Raises:
            SubmitError: it is no command job, or has something that an elastic job cannot carry.
            CommandError: its command has a launcher whose options cannot be translated.
            MissingExtra: azure-ai-ml is not installed.
        """
        from azureml_elastic.submit.conversion import fields_of

        return cls(**fields_of(command_job, resources, distribution, changes))

    def __repr__(self) -> str:
        from azureml_elastic.submit.display import as_words

        return as_words(self)

    def __str__(self) -> str:
        from azureml_elastic.submit.display import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from azureml_elastic.submit.display import as_html

        return as_html(self)

    @property
    def pools(self) -> tuple[NodePool, ...]:
        """The node pools in the order of preference; none where ``compute`` names a single compute."""
        return self.compute if isinstance(self.compute, tuple) else ()

    @property
    def plan(self) -> Plan:
        """What the nodes will receive. It names no run: each submission gets its name from Azure ML."""
        return Plan(
            resources=self.resources.model_copy(update=dict.fromkeys(_OF_THE_SUBMISSION)),
            distribution=self.distribution,
            checkpoint=self.checkpoint,
            batch=self.batch,
            pools=self.pools,
            replacement=self.replacement,
            audit=self.audit,
            profile=self.presets.profile,
        )

    def compile(self) -> Command | PipelineJob:
        """Return what is submitted, as a new entity of azure-ai-ml; nothing that the job holds is changed.

        ``MLClient`` does this by itself when it is given the job. Call it to look at the result, or to use the
        nodes in a pipeline of your own.

        Raises:
            SubmitError: fields of the job contradict each other.
            CommandError: the command starts no Python program, or one that is not in ``code``.
            MissingExtra: azure-ai-ml is not installed.
        """
        from azureml_elastic.submit.compilation import compile_job

        return compile_job(self)
