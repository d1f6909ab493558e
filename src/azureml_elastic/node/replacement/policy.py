"""What to do about a run's node jobs: a pure decision.

The pools are a list in the order of preference. What is wanted is

1. in each pool its floor,
2. up to ``most`` nodes in all, in the first pools that have room. A node that is waited for longer than
   ``fallback_after`` does not count as one, so that the next pool is asked for another; and nothing more is asked of a
   pool that keeps a node waiting,
3. no node more than that: when one of a preferred pool has come after all, one of the last pool goes.

Durations are differences of times that one server has set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.config.replacement import ReplacementPolicy
from azureml_elastic.config.resources import NodePool

__all__ = [
    "EARLY_S",
    "Action",
    "JobState",
    "NodeJob",
    "Start",
    "Stop",
    "cost",
    "decide",
    "limit_reached",
    "most_replacements",
]

EARLY_S = 120.0
"""A node that ran for less has brought the run nothing."""

_LONGEST_PAUSE_S = 3600.0
_EACH_NODE = 10

JobState = Literal["waiting", "running", "ended", "cancelled"]


@dataclass(frozen=True)
class NodeJob:
    """A job of Azure ML that is to be a node of the run.

    Args:
        pool: index of its pool.
        number: of the job within the pool, from 0 in the order of submission.
        name: of the job.
        state: ``waiting`` from its submission until its command runs.
        first: whether it was submitted with the run.
        waited_s: seconds since its submission, while it waits.
        ran_s: seconds that it has run, so far or in all.
        ended_s: seconds since its end.
        stopped: whether supervision has stopped it.
        submitted: whether it exists: a claim whose supervisor has died may be all that there is of it.
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


@dataclass(frozen=True)
class Start:
    """Submit another job.

    Args:
        pool: index of the pool.
        number: of the job within the pool.
        why: for the log.
    """

    pool: int
    number: int
    why: str


@dataclass(frozen=True)
class Stop:
    """Cancel a job.

    Args:
        job: that nobody needs.
        why: for the log.
    """

    job: NodeJob
    why: str


Action = Start | Stop


def most_replacements(policy: ReplacementPolicy, most: int) -> int:
    """Return how many jobs may be submitted beyond the first ones.

    Args:
        policy: may leave it open.
        most: nodes that may train at once.
    """
    return _EACH_NODE * most if policy.max_replacements is None else policy.max_replacements


def cost(pools: Sequence[NodePool], jobs: Iterable[NodeJob]) -> float:
    """Return what the jobs have cost so far, in USD; a pool without a price costs nothing."""
    return sum((pools[job.pool].price_per_hour or 0.0) * job.ran_s / 3600 for job in jobs)


def decide(
    pools: Sequence[NodePool],
    most: int,
    jobs: Sequence[NodeJob],
    policy: ReplacementPolicy,
    *,
    over: Literal["ended", "cancelled"] | None = None,
) -> list[Action]:
    """Return what is to be done now.

    Args:
        pools: in the order of preference.
        most: nodes that may train at once.
        jobs: all that were submitted for the run.
        policy: the patience and the limits.
        over: whether the run has ended, so that its nodes end by themselves and nothing is to be waited for, or its
            owner has cancelled it.
    """
    living = [job for job in jobs if job.submitted and job.state in ("waiting", "running")]
    alive = [job for job in living if not job.stopped]
    # The cancellation may have been lost, with the supervisor that was about to ask for it.
    stops = [Stop(job, "it was to end before") for job in living if job.stopped]
    wanted = most - sum(_is_removed(job) for job in jobs)
    if over == "cancelled" or wanted <= 0:
        stops += [Stop(job, "the run was cancelled") for job in alive]
    elif over == "ended":
        stops += [Stop(job, "the run has ended") for job in alive if job.state == "waiting"]
    else:
        stops += _stops(pools, wanted, alive)
    starts = _starts(pools, wanted, jobs, alive, policy, most) if over is None else []
    return [*starts, *(stop for stop in stops if stop.job.name)]


def limit_reached(
    pools: Sequence[NodePool], most: int, jobs: Sequence[NodeJob], policy: ReplacementPolicy
) -> str | None:
    """Return which limit of the policy keeps lost nodes from being replaced, ``None`` for none.

    Args:
        pools: in the order of preference.
        most: nodes that may train at once.
        jobs: all that were submitted for the run.
        policy: the limits.
    """
    limit = most_replacements(policy, most)
    if sum(job.submitted and not job.first for job in jobs) >= limit:
        return f"The limit of {limit} replacements is reached; raise max_replacements."
    spent = cost(pools, jobs)
    if policy.budget is not None and spent >= policy.budget:
        return f"The nodes have cost {spent:.2f} USD, the budget is {policy.budget:g} USD; raise the budget."
    return None


def _is_removed(job: NodeJob) -> bool:
    """Return whether the run's owner has cancelled the job: such a node is not wanted back."""
    return job.state == "cancelled" and not job.stopped


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
    patience = policy.fallback_after.total_seconds()
    starved = {job.pool for job in alive if job.state == "waiting" and job.waited_s >= patience}
    counts = [sum(job.pool == number for job in alive) for number in range(len(pools))]
    coming = sum(job.state == "running" or job.waited_s < patience for job in alive)
    starts: list[Start] = []

    def ask(number: int, why: str) -> None:
        nonlocal coming
        asked = {start.number for start in starts if start.pool == number}
        # A claim that nobody has followed up is followed up first.
        claimed = [job.number for job in jobs if job.pool == number and not job.submitted and job.number not in asked]
        last = max([-1, *(job.number for job in jobs if job.pool == number), *asked])
        starts.append(Start(number, min(claimed, default=last + 1), why))
        counts[number] += 1
        coming += 1

    paused = {number for number in range(len(pools)) if _pause(number, jobs, policy) > 0}
    for number in sorted(set(range(len(pools))) - paused):
        floor = pools[number].min_instance_count - sum(_is_removed(job) and job.pool == number for job in jobs)
        while counts[number] < floor and len(starts) < left:
            ask(number, "below the floor of its pool")
    for number in range(len(pools)):
        if number in paused and _since_last_end(number, jobs) < patience:
            # It will be asked again before the next pool would be.
            coming += max(0, min(pools[number].max_instance_count - counts[number], wanted - coming))
        if number in starved or number in paused:
            continue
        why = f"nodes of {pools[min(starved)].compute} do not come" if starved else "a node was lost"
        while counts[number] < pools[number].max_instance_count and coming < wanted and len(starts) < left:
            ask(number, why)
    return starts


def _pause(number: int, jobs: Sequence[NodeJob], policy: ReplacementPolicy) -> float:
    """Return for how many seconds nothing is asked of a pool whose last nodes ended early."""
    ended = [job for job in jobs if job.pool == number and job.state == "ended" and not job.stopped]
    early = 0
    for job in sorted(ended, key=lambda job: job.ended_s):
        if job.ran_s >= EARLY_S:
            break
        early += 1
    if not early:
        return 0.0
    pause = min(policy.retry_after.total_seconds() * 2.0 ** (early - 1), _LONGEST_PAUSE_S)
    return pause - _since_last_end(number, ended)


def _since_last_end(number: int, jobs: Sequence[NodeJob]) -> float:
    return min(job.ended_s for job in jobs if job.pool == number and job.state == "ended" and not job.stopped)


def _stops(pools: Sequence[NodePool], wanted: int, alive: Sequence[NodeJob]) -> list[Stop]:
    """Return the nodes that are too many, the least wanted first, and those that would be too many if they came."""
    running = [job for job in alive if job.state == "running"]
    surplus = len(running) - wanted
    stops: list[Stop] = []
    counts = [sum(job.pool == number for job in alive) for number in range(len(pools))]
    for job in sorted(running, key=lambda job: (job.pool, job.number), reverse=True):
        if surplus <= 0:
            break
        if counts[job.pool] > pools[job.pool].min_instance_count:
            stops.append(Stop(job, "more nodes run than are wanted"))
            counts[job.pool] -= 1
            surplus -= 1
    if len(running) - len(stops) < wanted:
        return stops
    # All places are taken: a node that is waited for is of use only where it would take one of a later pool.
    kept = [job for job in running if job not in {stop.job for stop in stops}]
    last = max((job.pool for job in kept if counts[job.pool] > pools[job.pool].min_instance_count), default=-1)
    for job in sorted(alive, key=lambda job: (job.pool, job.number), reverse=True):
        floor = pools[job.pool].min_instance_count
        if job.state == "waiting" and job.pool >= last and counts[job.pool] > floor:
            stops.append(Stop(job, "all places are taken"))
            counts[job.pool] -= 1
    return stops
