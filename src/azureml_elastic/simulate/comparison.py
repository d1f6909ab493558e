"""Comparison of the strategies, and the settings of an elastic run that are worth recommending."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from azureml_elastic.config import CheckpointPolicy, NodePool
from azureml_elastic.plurals import counted
from azureml_elastic.simulate.fleet import simulate_elastic
from azureml_elastic.simulate.rigid import simulate_rigid
from azureml_elastic.simulate.scenario import Outcome, Scenario, SimulatedPool, Strategy

_INTERVALS: tuple[float | None, ...] = (60.0, 300.0, 900.0, 3600.0)


@dataclass(frozen=True)
class Candidate:
    """Settings of an elastic run with their result."""

    scenario: Scenario
    result: Outcome

    @property
    def expense(self) -> float:
        """What the run costs: money, or node-hours where a price is missing."""
        cost = self.result.cost
        return self.result.node_hours if cost is None else float(cost)

    @property
    def every(self) -> str:
        """Interval between two checkpoints, in words."""
        every = self.scenario.checkpoint.every
        if self.scenario.checkpoint.every_steps is not None:
            return counted(self.scenario.checkpoint.every_steps, "step")
        return f"{every.total_seconds():g} s" if isinstance(every, timedelta) else str(every)

    @property
    def mix(self) -> str:
        """Nodes of each pool, in words."""
        pools = [each.pool for each in self.scenario.pools]
        return ", ".join(f"{pool.compute} {pool.min_instance_count}:{pool.max_instance_count}" for pool in pools)


def simulate(scenario: Scenario, strategy: Strategy) -> Outcome:
    """Simulate a run with one of the strategies."""
    return simulate_elastic(scenario) if strategy == "elastic" else simulate_rigid(scenario, strategy)


def candidates(scenario: Scenario) -> list[Scenario]:
    """Return the settings to try.

    Maximum and minimum are halved from the given maximum down to the given minimum, and the floor of a pool of machines
    that are always there takes up to half of the maximum; all with the given checkpoint policy.
    """
    found: dict[tuple[int, int, tuple[SimulatedPool, ...]], Scenario] = {}
    for maximum in _halves(scenario.maximum, scenario.minimum):
        for minimum in {scenario.minimum, max(scenario.minimum, maximum // 2), maximum}:
            for pools in _mixes(scenario.pools, maximum):
                capacity = sum(each.pool.max_instance_count for each in pools)
                if minimum <= capacity:
                    key = minimum, maximum, pools
                    found[key] = replace(scenario, minimum=minimum, maximum=maximum, pools=pools)
    return list(found.values())


def sweep(scenario: Scenario) -> list[Candidate]:
    """Simulate the candidates, and the recommended one of them with other checkpoint intervals."""
    found = [Candidate(each, simulate_elastic(each)) for each in candidates(scenario)]
    best = recommend(found)
    if best is not None:
        policies = [CheckpointPolicy(every="auto"), *(CheckpointPolicy(every=every) for every in _INTERVALS)]
        for policy in policies:
            if policy != best.scenario.checkpoint:
                changed = replace(best.scenario, checkpoint=policy)
                found.append(Candidate(changed, simulate_elastic(changed)))
    return found


def pareto_front(found: Iterable[Candidate]) -> list[Candidate]:
    """Return the finished candidates for which no other is both faster and cheaper, the fastest first."""
    front: list[Candidate] = []
    for each in sorted(_finished(found), key=lambda each: (each.result.seconds, each.expense)):
        if not front or each.expense < front[-1].expense:
            front.append(each)
    return front


def recommend(found: Iterable[Candidate], deadline: float = math.inf) -> Candidate | None:
    """Return the cheapest candidate that meets the deadline; without one, that of the smallest time times cost.

    Args:
        deadline: latest end of the run in seconds after its submission.
    """
    front = [each for each in pareto_front(found) if each.result.seconds <= deadline]
    if math.isfinite(deadline):
        return min(front, key=lambda each: each.expense, default=None)
    return min(front, key=lambda each: each.result.seconds * max(each.expense, 1e-9), default=None)


def _finished(found: Iterable[Candidate]) -> list[Candidate]:
    return [each for each in found if each.result.finished]


def _halves(highest: int, lowest: int) -> list[int]:
    found = [highest]
    while found[-1] // 2 >= max(1, lowest) and len(found) < 4:  # noqa: PLR2004 - a sweep takes seconds
        found.append(found[-1] // 2)
    return found


def _mixes(pools: Sequence[SimulatedPool], maximum: int) -> list[tuple[SimulatedPool, ...]]:
    """Return the pools with the floors to try of the first pool whose machines are always there."""
    steady = next((number for number, each in enumerate(pools) if each.trace is None), None)
    if steady is None or len(pools) == 1:
        return [tuple(pools)]
    most = pools[steady].pool.max_instance_count
    floors = sorted({floor for floor in (0, 1, maximum // 4, maximum // 2) if floor <= most})
    return [
        tuple(
            replace(each, pool=_with_floor(each.pool, floor)) if number == steady else each
            for number, each in enumerate(pools)
        )
        for floor in floors
    ]


def _with_floor(pool: NodePool, floor: int) -> NodePool:
    return NodePool.model_validate({**dict(pool), "min_instance_count": floor})
