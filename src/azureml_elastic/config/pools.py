"""Computes of different kinds and prices that give their nodes to one run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel

__all__ = ["SERVERLESS", "NodePool", "first_nodes", "replacement_name", "step_names"]

SERVERLESS = "serverless"
"""The compute that Azure ML makes by itself, of a VM size."""

_LONGEST_STEM = 40
_LONGEST_NAME = 255
"""Of a job of Azure ML."""


class NodePool(ConfigModel):
    """A compute of the workspace, and how many nodes it may give.

    The pools of a job are a list in the order of preference. Each gives its floor at once; what is left up to the run's
    ``max_instance_count`` is asked of the first pools that have room. What later pools could give beyond that is the
    fallback: asked for when nodes of the earlier ones do not come, see
    :class:`~azureml_elastic.config.replacement.SupervisionPolicy`.

    Args:
        compute: the cluster's name, or ``"serverless"``.
        min_instance_count: nodes that this pool is to have at any time, its floor.
        max_instance_count: nodes that it may have at once.
        instance_type: VM size, for serverless compute.
        job_tier: of serverless compute: ``"Spot"`` and others.
        price_per_hour: of one node, in USD; counts against the budget.
    """

    compute: str = Field(min_length=1)
    min_instance_count: int = Field(default=0, ge=0)
    max_instance_count: int = Field(ge=1)
    instance_type: str | None = None
    job_tier: Literal["Spot", "Basic", "Standard", "Premium"] | None = None
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    def __init__(self, compute: str | None = None, /, **fields: Any) -> None:
        if compute is not None:
            fields["compute"] = compute
        if isinstance(fields.get("compute"), str):
            fields["compute"] = fields["compute"].removeprefix("azureml:")
        super().__init__(**fields)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
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
    """Return how many nodes to ask of each pool when a run begins.

    Args:
        pools: in the order of preference.
        most: nodes that may train at once; at least the sum of the floors.
    """
    counts = [pool.min_instance_count for pool in pools]
    for number, pool in enumerate(pools):
        counts[number] += max(0, min(pool.max_instance_count - counts[number], most - sum(counts)))
    return tuple(counts)


def step_names(pools: Sequence[NodePool]) -> tuple[str, ...]:
    """Return for each pool how the names of its nodes begin: ``spot`` for ``spot_0``, ``spot_1`` and so on.

    A run without pools has nodes ``node_0``, ``node_1`` and so on.

    Args:
        pools: in the order of preference; none for a run without.
    """
    if not pools:
        return ("node",)
    stems: list[str] = []
    for pool in pools:
        words = [pool.compute, *(text for text in (pool.instance_type, pool.job_tier) if text)]
        stem = re.sub(r"\W+", "_", "_".join(words), flags=re.ASCII).strip("_").lower()[:_LONGEST_STEM].strip("_")
        stem = stem if re.match(r"[a-z]", stem) else f"pool_{stem}".strip("_")
        while stem in stems:
            stem += "_x"
        stems.append(stem)
    return tuple(stems)


def replacement_name(first: str, stem: str, number: int) -> str:
    """Return the name of the job that brings a node: the same for everyone who submits it, so that one alone does.

    Args:
        first: name of the run's first job.
        stem: of the pool's nodes.
        number: of the node within its pool.
    """
    tail = f"-{stem.replace('_', '-')}-{number}"
    if len(first) + len(tail) > _LONGEST_NAME:
        digest = hashlib.sha256(first.encode()).hexdigest()[:12]
        first = f"{first[: _LONGEST_NAME - len(tail) - len(digest) - 1]}-{digest}"
    return first + tail
