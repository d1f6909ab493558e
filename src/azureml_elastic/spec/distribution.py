"""How the processes of an elastic job are started, watched and restarted."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.spec.base import Duration, PositiveDuration, Spec
from azureml_elastic.spec.rendezvous import TableRendezvous

__all__ = ["ElasticDistribution"]


class ElasticDistribution(Spec):
    """The processes of an elastic job.

    Args:
        process_count_per_instance: workers a node, or ``"auto"`` for one per GPU (one where there is none).
        max_restarts: worker failures that the *whole run* may have before it fails. Lost and preempted nodes
            do not count.
        monitor_interval: between two looks at the local workers.
        stop_timeout: from SIGTERM to SIGKILL when workers of a finished round are stopped.
        preemption_grace: time to reach a step boundary and save after a preemption notice.
        rendezvous: where the nodes find each other.
    """

    type: Literal["elastic"] = "elastic"
    process_count_per_instance: int | Literal["auto"] = "auto"
    max_restarts: int = Field(default=3, ge=0)
    monitor_interval: PositiveDuration = timedelta(seconds=0.1)
    stop_timeout: Duration = timedelta(seconds=5)
    preemption_grace: Duration = timedelta(seconds=25)
    rendezvous: TableRendezvous = TableRendezvous()

    @model_validator(mode="after")
    def _count_is_positive(self) -> Self:
        count = self.process_count_per_instance
        if isinstance(count, int) and count < 1:
            raise ValueError(
                f'process_count_per_instance={count} is below the limit of 1; give a positive count or "auto"'
            )
        return self
