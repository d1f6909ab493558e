"""How lost nodes are replaced, and by whom."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration

__all__ = ["CANCELLED_TAG", "SupervisionPolicy"]

CANCELLED_TAG = "azureml_elastic.cancelled"
"""Of the first job of a run that its owner has cancelled: Azure ML cannot cancel a job whose nodes are all lost."""


class SupervisionPolicy(ConfigModel):
    """What is done about nodes that do not come, or do not come back.

    The node of rank 0 does it where its identity may read and submit jobs, and so does ``azureml-elastic supervise``.

    Args:
        by_nodes: whether the nodes supervise their run themselves; without, only the command does.
        interval: between two looks at the jobs.
        fallback_after: how long a node may be waited for before one is asked of the next pool.
        retry_after: the pause after a node that ended within two minutes; twice as long after each further one in a
            row, an hour at most.
        max_replacements: node jobs that may be submitted beyond the first ones; ``None`` takes ten for each node of
            ``max_instance_count``.
        budget: in USD; once the nodes have cost so much, none is asked for any more. Needs the price of every pool.
    """

    by_nodes: bool = True
    interval: PositiveDuration = timedelta(seconds=30)
    fallback_after: Duration = timedelta(minutes=10)
    retry_after: PositiveDuration = timedelta(minutes=1)
    max_replacements: int | None = Field(default=None, ge=0)
    budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)
