"""Decision which node jobs of a run to submit and to cancel, as pure functions.

Pools are listed in the order of preference. The target is

1. in each pool at least its ``min_instance_count``,
2. up to ``most`` nodes in total, in the first pools with free capacity. A node that waits longer than
   ``fallback_after`` does not count, so that the next pool is used; no further node is requested from a pool in which
   one waits,
3. no more nodes than that: if a node of a preferred pool arrives later, one of the last pool is cancelled.

Durations are differences of times set by one server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from azureml_elastic.config.policies import ReplacementPolicy
from azureml_elastic.config.resources import NodePool
from azureml_elastic.plurals import counted

EARLY_S = 120.0
"""Seconds that a node must have run not to count as having ended early."""

_LONGEST_PAUSE_S = 3600.0
_REPLACEMENTS_PER_NODE = 10

JobState = Literal["waiting", "running", "ended", "cancelled"]


@dataclass(frozen=True)
class NodeJob:
    """Job of Azure ML that is a node of the run.

    Args:
        pool: index of the pool.
        number: number of the job within the pool, from 0 in the order of submission.
        state: state; ``waiting`` from submission until the command runs.
        first: whether the job was submitted with the run.
        waited_s: seconds since submission, while waiting.
        ran_s: seconds of execution so far or in total.
        ended_s: seconds since the end.
        stopped: whether a replacer has cancelled the job.
        submitted: whether the job exists; false for a claim that was not followed by a submission.
    """

    pool: int
    number: int
    name: str
    state: JobState
    first: bool = True
    waited_s: float = 0.0
    ran_s: float = 0.0
    ended_s: float = 0.0
    stopped: bool = False
    submitted: bool = True

    @property
    def alive(self) -> bool:
        """Whether the job is waiting or running."""
        return self.submitted and self.state in ("waiting", "running")

    @property
    def removed(self) -> bool:
        """Whether the owner of the run cancelled the job: such a node is not replaced."""
        return self.state == "cancelled" and not self.stopped


@dataclass(frozen=True)
class Start:
    """Decision to submit the job with this number to the pool with this index; ``why`` is for the log."""

    pool: int
    number: int
    why: str


@dataclass(frozen=True)
class Stop:
    """Decision to cancel a job; ``why`` is for the log."""

    job: NodeJob
    why: str


def most_replacements(policy: ReplacementPolicy, most: int) -> int:
    """Return the maximum number of jobs beyond the first ones, for at most ``most`` concurrent nodes."""
    return _REPLACEMENTS_PER_NODE * most if policy.max_replacements is None else policy.max_replacements


def cost(pools: Sequence[NodePool], jobs: Iterable[NodeJob]) -> float:
    """Return the cost of the jobs so far in USD; pools without a price cost nothing."""
    return sum((pools[job.pool].price_per_hour or 0.0) * job.ran_s / 3600 for job in jobs)


def decide(
    pools: Sequence[NodePool],
    most: int,
    jobs: Sequence[NodeJob],
    policy: ReplacementPolicy,
    *,
    over: Literal["ended", "cancelled"] | None = None,
) -> list[Start | Stop]:
    """Return the actions to take now.

    Args:
        pools: pools in the order of preference.
        most: maximum number of concurrent nodes.
        over: ``"ended"`` if the run has ended, so that running nodes end by themselves; ``"cancelled"`` if its owner
            has cancelled it; ``None`` while it is active.
    """
    exist = [job for job in jobs if job.alive]
    alive = [job for job in exist if not job.stopped]
    # The process that decided on the cancellation may have died before it sent the request.
    stops = [Stop(job, "its cancellation was decided before") for job in exist if job.stopped]
    wanted = most - sum(job.removed for job in jobs)
    if over == "cancelled" or wanted <= 0:
        stops += [Stop(job, "the run was cancelled") for job in alive]
    elif over == "ended":
        stops += [Stop(job, "the run has ended") for job in alive if job.state == "waiting"]
    else:
        stops += _stops(pools, wanted, alive)
    starts = _starts(pools, wanted, jobs, alive, policy, most) if over is None else []
    return [*starts, *(stop for stop in stops if stop.job.name)]


def next_change(pools: Sequence[NodePool], jobs: Sequence[NodeJob], policy: ReplacementPolicy) -> float:
    """Return the seconds until time alone may change the decision of an active run; infinite if it cannot.

    The budget is not considered: reaching it only prevents actions that another change causes.
    """
    fallback_after = policy.fallback_after.total_seconds()
    moments = [fallback_after - job.waited_s for job in jobs if job.state == "waiting" and job.alive]
    for number in range(len(pools)):
        if (pause := _pause(number, jobs, policy)) > 0:
            moments += [pause, fallback_after - _since_last_end(number, jobs)]
    return min((moment for moment in moments if moment > 0), default=math.inf)


def limit_reached(
    pools: Sequence[NodePool], most: int, jobs: Sequence[NodeJob], policy: ReplacementPolicy
) -> str | None:
    """Return the policy limit that prevents replacement, in words, or ``None``."""
    limit = most_replacements(policy, most)
    if sum(job.submitted and not job.first for job in jobs) >= limit:
        return f"The limit of {counted(limit, 'replacement')} is reached; raise max_replacements."
    if policy.budget is not None and (spent := cost(pools, jobs)) >= policy.budget:
        return f"The nodes have cost {spent:.2f} USD, the budget is {policy.budget:g} USD; raise the budget."
    return None


def _starts(
    pools: Sequence[NodePool],
    wanted: int,
    jobs: Sequence[NodeJob],
    alive: Sequence[NodeJob],
    policy: ReplacementPolicy,
    most: int,
) -> list[Start]:
    if limit_reached(pools, most, jobs, policy) is not None:
        return []
    left = most_replacements(policy, most) - sum(job.submitted and not job.first for job in jobs)
    fallback_after = policy.fallback_after.total_seconds()
    delayed = {job.pool for job in alive if job.state == "waiting" and job.waited_s >= fallback_after}
    counts = [sum(job.pool == number for job in alive) for number in range(len(pools))]
    coming = sum(job.state == "running" or job.waited_s < fallback_after for job in alive)
    starts: list[Start] = []

    def add(number: int, why: str) -> None:
        nonlocal coming
        added = {start.number for start in starts if start.pool == number}
        # A claim without a submission comes first.
        claimed = [job.number for job in jobs if job.pool == number and not job.submitted and job.number not in added]
        last = max([-1, *(job.number for job in jobs if job.pool == number), *added])
        starts.append(Start(number, min(claimed, default=last + 1), why))
        counts[number] += 1
        coming += 1

    paused = {number for number in range(len(pools)) if _pause(number, jobs, policy) > 0}
    for number in sorted(set(range(len(pools))) - paused):
        floor = pools[number].min_instance_count - sum(job.removed and job.pool == number for job in jobs)
        while counts[number] < floor and len(starts) < left:
            add(number, "its pool is below min_instance_count")
    for number in range(len(pools)):
        if number in paused and _since_last_end(number, jobs) < fallback_after:
            # This pool is due again before a fallback to the next one.
            coming += max(0, min(pools[number].max_instance_count - counts[number], wanted - coming))
        if number in delayed or number in paused:
            continue
        why = f"nodes of {pools[min(delayed)].compute} do not start" if delayed else "a node was lost"
        while counts[number] < pools[number].max_instance_count and coming < wanted and len(starts) < left:
            add(number, why)
    return starts


def _pause(number: int, jobs: Sequence[NodeJob], policy: ReplacementPolicy) -> float:
    """Return the seconds for which a pool whose last nodes ended early is paused."""
    ended = [job for job in jobs if job.pool == number and job.state == "ended" and not job.stopped]
    early = len(list(takewhile(lambda job: job.ran_s < EARLY_S, sorted(ended, key=lambda job: job.ended_s))))
    if not early:
        return 0.0
    # Doubled with each early end in a row: what ends a node in its first minutes, such as an image that cannot be
    # pulled, mostly ends the next one, too, and each one costs.
    pause = min(policy.retry_after.total_seconds() * 2.0 ** (early - 1), _LONGEST_PAUSE_S)
    return pause - _since_last_end(number, ended)


def _since_last_end(number: int, jobs: Sequence[NodeJob]) -> float:
    return min(job.ended_s for job in jobs if job.pool == number and job.state == "ended" and not job.stopped)


def _stops(pools: Sequence[NodePool], wanted: int, alive: Sequence[NodeJob]) -> list[Stop]:
    """Return the surplus running nodes, least preferred first, and the waiting ones that would be surplus."""
    running = [job for job in alive if job.state == "running"]
    surplus = len(running) - wanted
    stops: list[Stop] = []
    counts = [sum(job.pool == number for job in alive) for number in range(len(pools))]
    for job in sorted(running, key=lambda job: (job.pool, job.number), reverse=True):
        if surplus <= 0:
            break
        if counts[job.pool] > pools[job.pool].min_instance_count:
            stops.append(Stop(job, "more nodes run than are needed"))
            counts[job.pool] -= 1
            surplus -= 1
    if len(running) - len(stops) < wanted:
        return stops
    # Enough nodes run: a waiting node is useful only if it would replace one of a later pool.
    kept = [job for job in running if job not in {stop.job for stop in stops}]
    last = max((job.pool for job in kept if counts[job.pool] > pools[job.pool].min_instance_count), default=-1)
    for job in sorted(alive, key=lambda job: (job.pool, job.number), reverse=True):
        floor = pools[job.pool].min_instance_count
        if job.state == "waiting" and job.pool >= last and counts[job.pool] > floor:
            stops.append(Stop(job, "enough nodes run"))
            counts[job.pool] -= 1
    return stops
