"""The policy by which lost nodes are replaced."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration

__all__ = ["CANCELLED_TAG", "ReplacementPolicy"]

CANCELLED_TAG = "azureml_elastic.cancelled"
"""Tag of a run's first job that its owner has cancelled. Azure ML cannot cancel a job whose nodes are all lost."""


class ReplacementPolicy(ConfigModel):
    """Limits and intervals for replacing nodes that are lost or do not start.

    The node of rank 0 replaces nodes where its identity may read and submit jobs; ``azureml-elastic replace-nodes``
    does the same from any machine.

    Args:
        by_nodes: whether the run's own nodes replace lost ones; if false, only the command does.
        interval: time between two checks of the jobs.
        fallback_after: time that a node may wait for a machine before one of the next pool is requested.
        retry_after: pause after a node that ended within two minutes; it doubles with each further one in a row, up to
            an hour.
        max_replacements: maximum number of node jobs beyond the first ones; ``None`` means ten for each node of
            ``max_instance_count``.
        budget: cost in USD from which no further node is requested. Requires the price of every pool.
    """

    by_nodes: bool = True
    interval: PositiveDuration = timedelta(seconds=30)
    fallback_after: Duration = timedelta(minutes=10)
    retry_after: PositiveDuration = timedelta(minutes=1)
    max_replacements: int | None = Field(default=None, ge=0)
    budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)
