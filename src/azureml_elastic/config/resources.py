"""How many nodes a job may have, and of which kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel

__all__ = ["ElasticResources", "Placement"]

Placement = Literal["fan_out", "service", "gang"]
"""How the nodes reach Azure ML.

- ``fan_out``: a pipeline of single-node command jobs, each scheduled on its own. Training starts with the
  first ``min_instance_count`` of them and the loss of one leaves the others alone.
- ``service``: one command job with ``instance_count=min`` and the service's own ``max_instance_count``.
- ``gang``: one command job with ``instance_count=max``; all nodes start together.
"""


class ElasticResources(ConfigModel):
    """The nodes of an elastic job.

    Args:
        min_instance_count: nodes that must be present for training to run, at least 1.
        max_instance_count: nodes that may train at once, at least ``min_instance_count``.
        shm_size: size of ``/dev/shm`` in each container, as Docker writes it (``"64g"``).
        instance_type: VM size, for serverless compute.
        docker_args: extra arguments for ``docker run``, one string or a list.
        locations: regions in which the job may run.
        properties: further properties of the compute, passed through unread.
        placement: see :data:`Placement`; ``None`` takes ``fan_out`` where more than one node may run and
            ``gang`` otherwise.
    """

    min_instance_count: int = Field(default=1)
    max_instance_count: int
    shm_size: str | None = None
    instance_type: str | None = None
    docker_args: str | tuple[str, ...] | None = None
    locations: tuple[str, ...] | None = None
    properties: Mapping[str, Any] | None = None
    placement: Placement | None = None

    @model_validator(mode="after")
    def _counts_make_sense(self) -> Self:
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
        """The placement after the default has been taken."""
        if self.placement is not None:
            return self.placement
        return "fan_out" if self.max_instance_count > 1 else "gang"
