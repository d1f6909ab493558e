"""How the processes of an elastic job are started, watched and restarted."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration
from azureml_elastic.config.health import HealthPolicy
from azureml_elastic.config.preemption import PreemptionPolicy
from azureml_elastic.config.rendezvous import TableRendezvous

__all__ = ["ElasticDistribution", "Recovery"]

Recovery = Literal["restart", "in_process"]
"""What becomes of the workers when another one is lost, see :class:`ElasticDistribution`."""


class ElasticDistribution(ConfigModel):
    """The processes of an elastic job.

    Args:
        process_count_per_instance: workers a node, or ``"auto"`` for one per GPU (one where there is none).
        max_restarts: worker failures that the *whole run* may have within ``restart_window`` before it fails. Lost
            and preempted nodes do not count.
        restart_window: after which a failure is forgiven if the run has got further since; ``None`` forgives none.
            An hour: a program that fails in a loop spends the budget long before, and what fails less often than
            three times an hour costs a small part of the time.
        recovery: what becomes of the workers when another one is lost. ``restart`` starts new ones, which take over the
            state that the old ones hand over in memory; ``in_process`` keeps those that are unharmed: see
            ``docs/recovery.md`` for what that asks of a script.
        handover_timeout: for workers whose round is over to hand their state over, or to be ready for the next one;
            what is lost otherwise are the steps since the last checkpoint.
        warm_workers: whether a process of each node imports what the script imports, and workers are forked from it,
            wherever that is safe.
        monitor_interval: between two looks at the local workers.
        stop_timeout: from SIGTERM to SIGKILL when workers of a finished round are stopped.
        preemption: how nodes learn that they are about to be taken away.
        hang_timeout: without a completed step for so long, the stacks of all workers are written down and the round
            is restarted; ``"auto"`` learns it from the steps, ``None`` watches nothing.
        hang_timeout_floor: below which the learned time never falls; the first step of a round has four times as
            long at least.
        health: what a node must be able to do before it joins, and what is held against a host.
        rendezvous: where the nodes find each other.
    """

    type: Literal["elastic"] = "elastic"
    process_count_per_instance: int | Literal["auto"] = "auto"
    max_restarts: int = Field(default=3, ge=0)
    restart_window: PositiveDuration | None = timedelta(hours=1)
    recovery: Recovery = "restart"
    handover_timeout: Duration = timedelta(seconds=5)
    warm_workers: bool = True
    monitor_interval: PositiveDuration = timedelta(seconds=0.1)
    stop_timeout: Duration = timedelta(seconds=5)
    preemption: PreemptionPolicy = PreemptionPolicy()
    hang_timeout: PositiveDuration | Literal["auto"] | None = "auto"
    hang_timeout_floor: PositiveDuration = timedelta(minutes=5)
    health: HealthPolicy = HealthPolicy()
    rendezvous: TableRendezvous = TableRendezvous()

    @model_validator(mode="after")
    def _count_is_positive(self) -> Self:
        count = self.process_count_per_instance
        if isinstance(count, int) and count < 1:
            raise ValueError(
                f'process_count_per_instance={count} is below the limit of 1; give a positive count or "auto"'
            )
        return self
