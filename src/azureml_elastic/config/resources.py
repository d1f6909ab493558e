"""The nodes of a job: how many, of which kind, and from which node pools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Takes, default

SERVERLESS = "serverless"
"""Name of Azure ML's serverless compute, which is allocated by VM size."""

_LONGEST_STEM = 40
_LONGEST_NAME = 255  # limit of Azure ML for job names

JobTier = Annotated[
    Literal["Spot", "Basic", "Standard", "Premium"],
    BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
]
"""Tier of serverless compute; case is ignored, as in azure-ai-ml."""

Placement = Literal["fan_out", "service", "gang"]
"""The kind of Azure ML job that the nodes are submitted as.

- ``fan_out``: a pipeline of single-node command jobs, each scheduled independently. Training starts with the first
  ``min_instance_count`` of them, and the loss of one does not affect the others.
- ``service``: one command job with ``instance_count=min`` and the service's own ``max_instance_count``.
- ``gang``: one command job with ``instance_count=max``; all nodes start together.
"""


class ElasticResources(ConfigModel):
    """The nodes of an elastic job.

    Args:
        min_instance_count: number of nodes below which training pauses, at least 1.
        max_instance_count: number of nodes that may train at once, at least ``min_instance_count``.
        shm_size: size of ``/dev/shm`` in each container, in Docker's notation (``"64g"``).
        instance_type: VM size, for serverless compute.
        docker_args: extra arguments of ``docker run``, as one string or a list.
        locations: regions in which the job may run.
        properties: further properties of the compute, passed to Azure ML unchanged.
        placement: kind of Azure ML job, see :data:`Placement`. ``None`` selects ``fan_out`` for more than one node and
            ``gang`` otherwise.
    """

    min_instance_count: int = Field(default=1)
    max_instance_count: int
    shm_size: str | None = None
    instance_type: str | None = None
    docker_args: Takes[str | tuple[str, ...] | None, str | tuple[str, ...] | list[str] | None] = default(None)
    locations: Takes[tuple[str, ...] | None, tuple[str, ...] | list[str] | None] = default(None)
    properties: Mapping[str, Any] | None = None
    placement: Placement | None = None

    @field_validator("shm_size")
    @classmethod
    def _shm_size_has_a_unit(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"0*[1-9]\d*[bkmg]", value, re.ASCII | re.IGNORECASE):
            raise ValueError(
                f"shm_size={value!r} is no size that Azure ML takes; give a whole number and one letter, b, k, m or g, "
                "as in '64g'"
            )
        return value

    @model_validator(mode="after")
    def _counts_are_consistent(self) -> Self:
        for name in ("min_instance_count", "max_instance_count"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} is below the limit of 1; an elastic job has at least one node")
        if self.min_instance_count > self.max_instance_count:
            raise ValueError(
                f"min_instance_count={self.min_instance_count} is above "
                f"max_instance_count={self.max_instance_count}; lower the first or raise the second"
            )
        return self

    @property
    def effective_placement(self) -> Placement:
        """The placement with the default resolved."""
        if self.placement is not None:
            return self.placement
        return "fan_out" if self.max_instance_count > 1 else "gang"


class NodePool(ConfigModel):
    """A compute of the workspace as a source of nodes.

    A job lists its pools in the order of preference. Each pool provides its minimum at once; the remaining nodes up to
    the run's ``max_instance_count`` are requested from the first pools with capacity. Capacity of later pools beyond
    that is the fallback: it is used when nodes of earlier pools do not arrive, see
    :class:`~azureml_elastic.config.policies.ReplacementPolicy`.

    Args:
        compute: name of the cluster, or ``"serverless"``.
        min_instance_count: number of nodes that this pool provides at all times.
        max_instance_count: number of nodes that this pool may provide at once.
        instance_type: VM size, for serverless compute.
        job_tier: job tier, for serverless compute.
        price_per_hour: price of one node in USD per hour, counted against the budget.
    """

    compute: str = Field(min_length=1)
    min_instance_count: int = Field(default=0, ge=0)
    max_instance_count: int = Field(ge=1)
    instance_type: str | None = None
    job_tier: Takes[JobTier | None, str | None] = default(None)
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    if TYPE_CHECKING:

        def __init__(
            self,
            compute: str,
            *,
            max_instance_count: int,
            min_instance_count: int = 0,
            instance_type: str | None = None,
            job_tier: str | None = None,
            price_per_hour: float | None = None,
        ) -> None: ...
    else:

        def __init__(self, compute: str | None = None, /, **fields: Any) -> None:
            super().__init__(**fields if compute is None else {**fields, "compute": compute})

    @field_validator("compute")
    @classmethod
    def _compute_is_a_name(cls, value: str) -> str:
        return value.removeprefix("azureml:")

    @model_validator(mode="after")
    def _fields_are_consistent(self) -> Self:
        if self.min_instance_count > self.max_instance_count:
            raise ValueError(
                f"min_instance_count={self.min_instance_count} of the pool {self.compute!r} is above its "
                f"max_instance_count={self.max_instance_count}; lower the first or raise the second"
            )
        if not re.fullmatch(r"[\w.-]+", self.compute, re.ASCII):
            raise ValueError(
                f"compute={self.compute!r} is no name of a cluster; give the name alone, as in 'spot-cluster'"
            )
        if self.compute == "local":
            raise ValueError("compute='local' is no pool; give the name of a cluster, or 'serverless'")
        if self.compute == SERVERLESS and self.instance_type is None and self.job_tier is None:
            raise ValueError(
                "the pool 'serverless' needs instance_type='<VM size>' (with job_tier='Spot' for spot machines)"
            )
        if self.compute != SERVERLESS and (self.instance_type or self.job_tier):
            raise ValueError(
                f"the pool {self.compute!r} is a cluster, which has its VM size and tier already; instance_type and "
                "job_tier are for compute='serverless'"
            )
        return self


def first_nodes(pools: Sequence[NodePool], most: int) -> tuple[int, ...]:
    """Return the number of nodes to request from each pool when a run of at most ``most`` nodes starts."""
    counts = [pool.min_instance_count for pool in pools]
    for number, pool in enumerate(pools):
        counts[number] += max(0, min(pool.max_instance_count - counts[number], most - sum(counts)))
    return tuple(counts)


def step_names(pools: Sequence[NodePool]) -> tuple[str, ...]:
    """Return the prefix of the node names of each pool, such as ``spot`` for ``spot_0`` and ``spot_1``.

    Args:
        pools: node pools in the order of preference; empty for a run without pools, whose only prefix is ``node``.
    """
    if not pools:
        return ("node",)
    stems: list[str] = []
    for pool in pools:
        words = [pool.compute, *(text for text in (pool.instance_type, pool.job_tier) if text)]
        stem = re.sub(r"\W+", "_", "_".join(words), flags=re.ASCII).strip("_").lower()[:_LONGEST_STEM].strip("_")
        stem = stem if re.match(r"[a-z]", stem) else f"pool_{stem}".strip("_")
        while stem in stems:  # names that differ only in what an identifier cannot have, or behind the 40th character
            stem += "_x"
        stems.append(stem)
    return tuple(stems)


def replacement_name(first: str, stem: str, number: int) -> str:
    """Return the name of the job of a replacement node.

    The name is a function of its arguments, so that of several concurrent submissions exactly one succeeds.

    Args:
        first: name of the run's first job.
        stem: node name prefix of the pool.
        number: index of the node within its pool.
    """
    tail = f"-{stem.replace('_', '-')}-{number}"
    if len(first) + len(tail) > _LONGEST_NAME:
        digest = hashlib.sha256(first.encode()).hexdigest()[:12]
        first = f"{first[: _LONGEST_NAME - len(tail) - len(digest) - 1]}-{digest}"
    return first + tail
