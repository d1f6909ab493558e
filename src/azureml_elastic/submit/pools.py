"""What is refused of node pools: those that do not fit together, or not with the rest of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_elastic.errors import SubmitError

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

__all__ = ["check_pools"]


def check_pools(job: ElasticCommandJob) -> None:
    """Check that the pools, the node counts and the budget fit together.

    Args:
        job: any job, also one without pools.

    Raises:
        SubmitError: they do not.
    """
    _check_budget(job)
    if job.pools:
        _check_kinds(job)
        _check_counts(job)


def _check_budget(job: ElasticCommandJob) -> None:
    budget = None if job.replacement is None else job.replacement.budget
    if budget is None:
        return
    if not job.pools:
        raise SubmitError(
            f"replacement.budget={budget:g} USD needs a price. Name the compute as a pool that has one: "
            f"compute=[NodePool({job.compute or 'serverless'!r}, max_instance_count=..., price_per_hour=...)]."
        )
    unpriced = [pool.compute for pool in job.pools if pool.price_per_hour is None]
    if unpriced:
        raise SubmitError(
            f"replacement.budget={budget:g} USD needs the price of every pool, and {unpriced[0]!r} has none. Give "
            "NodePool(..., price_per_hour=...)."
        )


def _check_kinds(job: ElasticCommandJob) -> None:
    if job.resources.placement not in (None, "fan_out"):
        raise SubmitError(
            f"Node pools need the placement 'fan_out', whose nodes are jobs of their own; placement="
            f"{job.resources.placement!r} is one job on one compute. Leave placement out, or name one compute."
        )
    kinds = [(pool.compute, pool.instance_type, pool.job_tier) for pool in job.pools]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise SubmitError(f"The pool {kind[0]!r} is there {kinds.count(kind)} times. Make one of them.")
    for field, value in (("job_tier", job.job_tier), ("resources.instance_type", job.resources.instance_type)):
        if value is not None:
            raise SubmitError(
                f"{field}={value!r} cannot go with node pools, each of which is of a kind of its own. Give it to a "
                f"pool: NodePool('serverless', {field.rpartition('.')[2]}={value!r}, ...)."
            )


def _check_counts(job: ElasticCommandJob) -> None:
    most = job.resources.max_instance_count
    floors = sum(pool.min_instance_count for pool in job.pools)
    room = sum(pool.max_instance_count for pool in job.pools)
    if floors > most:
        raise SubmitError(
            f"The floors of the pools are {floors} nodes, above max_instance_count={most} of the resources. Lower the "
            "pools' min_instance_count or raise max_instance_count."
        )
    if room < most:
        raise SubmitError(
            f"The pools give {room} nodes at most, below max_instance_count={most} of the resources. Raise the pools' "
            "max_instance_count or lower that of the resources."
        )
