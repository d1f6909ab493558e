"""The fields of an elastic job and their validation, without any behaviour; azure-ai-ml is not imported.

Distributions of azure-ai-ml, given as objects or as dictionaries of their fields, are translated.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticSerializationError

from azureml_elastic.config.base import ConfigModel, PositiveDuration, Span, Takes, default
from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.config.frozen import is_fields
from azureml_elastic.config.plan import EarlierRun, Plan, SubmittedNames
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
from azureml_elastic.config.presets import Presets
from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.config.resources import SERVERLESS, ElasticResources, JobTier, NodePool
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.bindings import bound

Fields = Mapping[str, Any]
if TYPE_CHECKING:  # what a job takes of azure-ai-ml, whose import takes seconds
    from azure.ai.ml import PyTorchDistribution, RayDistribution
    from azure.ai.ml.entities import (
        AmlTokenConfiguration,
        Environment,
        ManagedIdentityConfiguration,
        UserIdentityConfiguration,
    )

    _Environment = str | Environment | Fields
    _Distribution = ElasticDistribution | PyTorchDistribution | RayDistribution | Fields
    _Identity = AmlTokenConfiguration | ManagedIdentityConfiguration | UserIdentityConfiguration | Fields | None
else:
    _Environment = _Distribution = _Identity = Any

_OF_RAY = ("address", "include_dashboard", "dashboard_port", "head_node_additional_args", "worker_node_additional_args")
"""Options of Ray that the elastic agents choose themselves."""

_MOVED = {
    "docker_args": "give resources=ElasticResources(docker_args=...)",
    "instance_count": "give resources=ElasticResources(min_instance_count=..., max_instance_count=...)",
    "instance_type": "give resources=ElasticResources(instance_type=...)",
    "is_deterministic": "nothing is ever answered from an earlier run; leave it out",
    "limits": "give timeout=...",
    "locations": "give resources=ElasticResources(locations=...)",
    "queue_settings": "give job_tier=... and priority=...",
    "shm_size": "give resources=ElasticResources(shm_size=...)",
}
"""Fields of azure-ai-ml's command jobs that an elastic job has elsewhere."""

_SETTERS = {
    "set_limits": 'timeout="2h"',
    "set_queue_settings": 'job_tier="Spot", priority="high"',
    "set_resources": 'resources={"max_instance_count": 4}',
}
"""Methods that change a command job of azure-ai-ml, and what changes an elastic job in a copy."""

_SUBMISSION_ONLY = ("docker_args", "instance_type", "locations", "properties", "shm_size")
"""Fields of ``resources`` beside the numbers of nodes."""

_NOT_IN_PLAN = tuple(name for name in _SUBMISSION_ONLY if name != "properties")
"""Those of which a replacement job has what Azure ML returns; it adds properties, also within the given ones."""

_DIGEST_CHARACTERS = 16
_PLAIN = (bool, int, float, str, os.PathLike)

_LINE_END = re.compile(r"\r+(\n|\Z)")
_COMPUTE = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_RESOURCE = re.compile(r"/subscriptions/[^@]+/(?:computes|virtualclusters)/[\w.-]+\Z", re.ASCII | re.IGNORECASE)
_JOB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,254}", re.ASCII)
_POOLS: TypeAdapter[tuple[NodePool, ...]] = TypeAdapter(tuple[NodePool, ...])

_NO_RESOURCES: Any = None
"""Default of ``resources``, which passes validation only where the node pools determine the counts."""

_KIND = "kind"
"""The field by which the models of a union differ."""


def _kind_of(given: Any) -> str | None:
    """Return the type of a distribution of azure-ai-ml in lower case, such as ``pytorch``; ``None`` for another value.

    Dictionaries without a type, and those of the type ``elastic``, have the fields of an ``ElasticDistribution``.
    """
    if given is None or isinstance(given, ElasticDistribution):
        return None
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    text = str(getattr(kind, "value", kind)).lower() if isinstance(kind, str) else None
    return None if text == "elastic" else text


def translated(given: Any) -> Any:
    """Return the fields that a distribution of azure-ai-ml has in an ``ElasticDistribution``; other values as given.

    Fields of an elastic distribution may stand beside the type ``pytorch``.

    Raises:
        SubmitError: the distribution has no elastic equivalent.
    """
    kind = _kind_of(given)
    if kind is None:
        return given
    fields = dict(given) if isinstance(given, Mapping) else {}
    fields.pop("type", None)
    if kind == "ray":
        options = {name: value for name in _OF_RAY if (value := fields.pop(name, getattr(given, name, None)))}
        for name, value in options.items():
            raise SubmitError(
                f"RayDistribution({name}={value!r}) cannot be carried: the elastic agents start Ray themselves. Leave "
                'it out, or give distribution=ElasticDistribution(framework="ray").'
            )
        fields.pop("port", None)
        return {"framework": "ray", **fields}
    if kind == "pytorch":
        count = fields.pop("process_count_per_instance", getattr(given, "process_count_per_instance", None))
        return {**fields, "process_count_per_instance": count or 1}
    instead = (
        'If the script runs Horovod, give distribution=ElasticDistribution(framework="horovod").'
        if kind == "mpi"
        else "If the script runs one of these, leave distribution out; else submit it as a plain command job."
    )
    raise SubmitError(
        f"The distribution {kind!r} cannot be carried: an elastic job runs PyTorch, Horovod, Dask or Ray. {instead}"
    )


def _with_text(values: Any) -> Any:
    """Return a mapping with numbers and truth values as text, as azure-ai-ml submits them, and without ``None``."""
    if not isinstance(values, Mapping):
        return values
    found = ((name, value) for name, value in values.items() if value is not None)
    return {name: str(value) if isinstance(value, bool | int | float) else value for name, value in found}


_Texts = Takes[Annotated[Mapping[str, str], BeforeValidator(_with_text)], Mapping[str, str | int | float | bool | None]]
_Priority = Annotated[
    Literal["low", "medium", "high"], BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
]


class JobFields(ConfigModel):
    """Base model of :class:`~azureml_elastic.submit.job.ElasticCommandJob`, whose docstring describes the fields."""

    model_config = ConfigDict(hide_input_in_errors=True)  # pydantic would show values of environment variables

    type: Literal["elastic_command"] = "elastic_command"
    command: str
    environment: Takes[Any, _Environment]
    resources: Takes[ElasticResources, ElasticResources | Fields | None] = default(_NO_RESOURCES)
    code: str | os.PathLike[str] | None = None
    compute: Takes[str | tuple[NodePool, ...] | None, str | Sequence[NodePool] | None] = default(None)
    inputs: Mapping[str, Any] = {}
    outputs: Mapping[str, Any] = {}
    environment_variables: _Texts = default({})
    distribution: Takes[ElasticDistribution, _Distribution] = default(ElasticDistribution())
    checkpoint: Takes[CheckpointPolicy, CheckpointPolicy | Fields] = default(CheckpointPolicy())
    batch: Takes[BatchPolicy, BatchPolicy | Fields] = default(FixedGlobalBatch())
    preemption: Takes[PreemptionPolicy, PreemptionPolicy | Fields] = default(PreemptionPolicy())
    health: Takes[HealthPolicy, HealthPolicy | Fields] = default(HealthPolicy())
    rendezvous: Takes[TableRendezvous, TableRendezvous | Fields] = default(TableRendezvous())
    replacement: Takes[ReplacementPolicy | None, ReplacementPolicy | Fields | None] = default(ReplacementPolicy())
    metrics: Takes[MetricsPolicy, MetricsPolicy | Fields] = default(MetricsPolicy())
    profile: Takes[Profile | None, Profile | Fields | None] = default(None)
    audit: bool = False
    resume_from: str | None = None
    presets: Takes[Presets, Presets | Fields] = default(Presets())
    name: str | None = None
    display_name: str | None = None
    experiment_name: str | None = None
    description: str | None = None
    tags: _Texts = default({})
    properties: _Texts = default({})
    identity: Takes[Any, _Identity] = default(None)
    timeout: Takes[PositiveDuration | None, Span | None] = default(None)
    services: Mapping[str, Any] | None = None
    job_tier: Takes[JobTier | None, str | None] = default(None)
    priority: Takes[_Priority | None, str | None] = default(None)
    parent_job_name: str | None = None
    delivery: Literal["ship", "environment"] = "ship"

    @classmethod
    def _absent(cls, name: str) -> str:
        if name in _SETTERS:
            return (
                f"A job has no {name}(), as it cannot be changed in place. Make a changed copy: "
                f"job = job.with_options({_SETTERS[name]})"
            )
        if name in _MOVED:
            return f"{name} is no field of an elastic job: {_MOVED[name]}"
        return f"{super()._absent(name)}. What create_or_update(job) returns has the fields of a submitted job"

    @model_validator(mode="before")
    @classmethod
    def _reject_moved_fields(cls, fields: Any) -> Any:
        moved = sorted(_MOVED.keys() & fields.keys()) if isinstance(fields, dict) else []
        if moved:
            raise ValueError(
                f"{moved[0]} is no field of an elastic job: {_MOVED[moved[0]]} "
                "(ElasticCommandJob.from_command() translates a job of azure-ai-ml)"
            )
        return fields

    @model_validator(mode="before")
    @classmethod
    def _derive_counts_from_pools(cls, fields: Any) -> Any:
        """Derive missing node counts from the pools, and default their placement to single-node jobs."""
        compute = fields.get("compute") if isinstance(fields, dict) else None
        if compute is None or isinstance(compute, str):
            return fields
        given = fields.get("resources")
        try:
            pools = _POOLS.validate_python(compute)
            resources = None if given is None else ElasticResources.model_validate(given)
        except ValidationError:  # reported later under the name of its field
            return fields if given is not None else {**fields, "resources": ElasticResources(max_instance_count=1)}
        if not pools:
            raise ValueError("compute=[] has no pool; give at least one NodePool, or the name of a cluster")
        if resources is None:
            resources = resources_of_pools(pools)
        if resources.placement is None:
            resources = resources.model_copy(update={"placement": "fan_out"})
        return {**fields, "compute": pools, "resources": resources}

    @field_validator("compute", mode="wrap")
    @classmethod
    def _compute_is_a_name_or_pools(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Validate a list as pools alone, so that its errors are not those of a name, too."""
        if isinstance(value, str):
            name = value.removeprefix("azureml:")
            if not (_COMPUTE.fullmatch(name) or _RESOURCE.match(name)):
                raise ValueError(
                    f"compute={value!r} is no name of a compute, which has letters, digits, '-', '_' and '.' alone; "
                    "give it as in 'spot-cluster', or None for serverless compute"
                )
            return handler(name)
        if value is None:
            return handler(value)
        if not isinstance(value, list | tuple):
            raise ValueError(  # noqa: TRY004 - pydantic reports a ValueError
                f"compute is of the type {type(value).__name__}; give the name of a cluster, or a list of pools, as in "
                "[NodePool('spot', max_instance_count=4)]"
            )
        names = [pool for pool in value if isinstance(pool, str)]
        if names:
            raise ValueError(
                f"compute has the name {names[0]!r} in its list; a list has pools, as in [NodePool({names[0]!r}, "
                "max_instance_count=4)]. Give a single cluster by its name alone"
            )
        return handler(_POOLS.validate_python(value))

    @field_validator("inputs")
    @classmethod
    def _inputs_are_bound(cls, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: bound(value) for name, value in inputs.items()}

    @field_validator("command")
    @classmethod
    def _lines_end_as_in_a_shell(cls, value: str) -> str:
        """Remove carriage returns at the ends of lines, which a shell would take for part of a name."""
        return _LINE_END.sub(r"\1", value)

    @field_validator("name")
    @classmethod
    def _name_is_allowed(cls, value: str | None) -> str | None:
        if value is not None and not _JOB_NAME.fullmatch(value):
            raise ValueError(
                f"name={value!r} is no name that Azure ML takes; give at most 255 letters, digits, '-', '_' and '.', "
                "the first of which is a letter or a digit. display_name takes any text"
            )
        return value

    @field_validator("identity")
    @classmethod
    def _identity_is_no_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(  # noqa: TRY004 - pydantic reports a ValueError
                f"identity={value!r} is a text; give an object of azure.ai.ml, such as UserIdentityConfiguration(), "
                "AmlTokenConfiguration() or ManagedIdentityConfiguration(client_id=...)"
            )
        return value

    @field_validator(
        "resources", "distribution", "checkpoint", "preemption", "health", "rendezvous", "metrics", mode="before"
    )
    @classmethod
    def _is_elastic_type(cls, value: Any, info: Any) -> Any:
        expected = cls.model_fields[info.field_name].annotation
        if info.field_name == "distribution":
            try:
                value = translated(value)
            except SubmitError as error:
                raise ValueError(str(error)) from error
        if value is None and info.field_name == "resources":
            raise ValueError(
                "resources is missing; give the number of nodes, as in "
                "resources=ElasticResources(min_instance_count=1, max_instance_count=4), or pools in compute"
            )
        if isinstance(expected, type) and not (isinstance(value, expected) or type(value) is dict):
            raise ValueError(
                f"{info.field_name} is of the type {type(value).__name__}; an elastic job takes an "
                f"{expected.__name__}, from azureml_elastic import {expected.__name__}"
            )
        return value

    def model_dump_json(self, **options: Any) -> str:
        """Return the job as JSON, see :meth:`pydantic.BaseModel.model_dump_json`.

        Raises:
            SubmitError: the job holds objects of azure-ai-ml.
        """
        try:
            return super().model_dump_json(**options)
        except PydanticSerializationError as error:
            raise SubmitError(
                f"The job cannot be written as JSON: {error}. Give names and dictionaries of fields in place of "
                "objects of azure-ai-ml, as in environment='azureml:my-environment@latest'."
            ) from None

    @property
    def pools(self) -> tuple[NodePool, ...]:
        """The node pools in the order of preference; empty if ``compute`` names a single compute."""
        return self.compute if isinstance(self.compute, tuple) else ()

    @property
    def plan(self) -> Plan:
        """The configuration that the nodes receive. It has no run id: Azure ML names each submission."""
        return Plan(
            program=self._program,
            resources=self.resources.model_copy(update=dict.fromkeys(_NOT_IN_PLAN)),
            distribution=self.distribution,
            checkpoint=self.checkpoint,
            batch=self.batch,
            preemption=self.preemption,
            health=self.health,
            rendezvous=self.rendezvous,
            metrics=self.metrics,
            pools=self.pools,
            replacement=self.replacement,
            resume_from=None if self.resume_from is None else EarlierRun(name=self.resume_from),
            submitted=self._submitted_names,
            audit=self.audit,
            profile=self.profile,
        )

    @property
    def _program(self) -> str:
        """Digest of what the job runs on what: command, code and inputs, as they were given."""
        inputs = {
            name: field_of(value, "path") or field_of(value, "default") or value for name, value in self.inputs.items()
        }
        literals = sorted((name, str(value)) for name, value in inputs.items() if isinstance(value, _PLAIN))
        text = json.dumps([self.command, None if self.code is None else str(self.code), literals])
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]

    @property
    def _submitted_names(self) -> SubmittedNames:
        located = {name for name, output in self.outputs.items() if field_of(output, "path") is not None}
        return SubmittedNames(
            outputs=tuple(sorted(located)),
            own_outputs=tuple(sorted(self.outputs.keys() - located)),
            properties=tuple(sorted(self.properties)),
            resources=tuple(name for name in _SUBMISSION_ONLY if getattr(self.resources, name) is not None),
            services=tuple(sorted(self.services or ())),
            tags=tuple(sorted(self.tags)),
        )

    @property
    def network_location(self) -> tuple[tuple[str | None, ...], bool]:
        """The nodes' VM sizes (``None`` if unknown), and whether all nodes are in one cluster or one job.

        Nodes of one cluster are close to each other; each job on serverless compute gets unrelated machines.
        """
        if self.pools:
            computes = {pool.compute for pool in self.pools}
            sizes: tuple[str | None, ...] = tuple(pool.instance_type for pool in self.pools)
        else:
            computes, sizes = {str(self.compute or SERVERLESS)}, (self.resources.instance_type,)
        one_job = self.resources.effective_placement != "fan_out" or self.resources.max_instance_count == 1
        return sizes, one_job or (len(computes) == 1 and SERVERLESS not in computes)

    def __hash__(self) -> int:
        """Return a hash of fields without mappings, whose values need not be hashable."""
        return hash((self.command, self.name, self.experiment_name, self.resources.max_instance_count))


def resources_of_pools(pools: Sequence[NodePool]) -> ElasticResources:
    """Return the resources that pools determine where the job gives none."""
    least = max(1, sum(pool.min_instance_count for pool in pools))
    most = sum(pool.max_instance_count for pool in pools)
    return ElasticResources(min_instance_count=least, max_instance_count=most, placement="fan_out")


def field_of(value: Any, name: str) -> Any:
    """Return a field of an object of azure-ai-ml, or of a dictionary of its fields; ``None`` if it is not set."""
    return value.get(name) if is_fields(value) else getattr(value, name, None)


def given_fields(model: ConfigModel) -> dict[str, Any]:
    """Return the fields that a model was given, without those that have their defaults."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def merged_fields(job: JobFields, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job with changes, which are not validated.

    Mappings are merged with those of the job, and a mapping changes the fields of a model that the job has.
    """
    fields = given_fields(job)
    if job.pools and "compute" in changes and job.resources == resources_of_pools(job.pools):
        del fields["resources"]  # derived again from the new pools
        if isinstance(changes["compute"], str | None):
            fields["resources"] = job.resources
    for name, value in changes.items():
        fields[name] = _merged(getattr(job, name, None), value)
    return fields


def _merged(held: Any, change: Any) -> Any:
    if not isinstance(change, Mapping):
        return change
    if not isinstance(held, ConfigModel):
        return {**held, **change} if isinstance(held, Mapping) else change
    fields = given_fields(held)
    kind = getattr(held, _KIND, None)
    if kind is not None:
        if change.get(_KIND, kind) != kind:
            return change  # another policy, to which the fields of this one do not belong
        fields[_KIND] = kind
    nested = {name: getattr(held, name, None) for name in change}
    return fields | {
        name: _merged(nested[name], value) if isinstance(nested[name], ConfigModel) else value
        for name, value in change.items()
    }
