"""Comparison of the strategies, and the settings of an elastic run that are worth recommending.

**Runs of a fixed number of nodes: one that starts from scratch after a loss, and one that restarts from a checkpoint.**
They are treated favourably: nodes that wait for the last one are not billed, and a failed job is submitted again at
once, to the machines that are still there without provisioning them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from azureml_elastic.config import CheckpointPolicy, NodePool
from azureml_elastic.plurals import counted
from azureml_elastic.simulate.fleet import simulate_elastic
from azureml_elastic.simulate.scenario import (
    Accounts,
    Life,
    Machine,
    MachineChange,
    Outcome,
    Scenario,
    SimulatedPool,
    Strategy,
    exact,
    machine_changes,
    outcome,
)
from azureml_elastic.simulate.training import Training


def simulate_rigid(scenario: Scenario, strategy: Literal["rigid", "restart"]) -> Outcome:
    """Simulate a run that trains on ``scenario.maximum`` nodes or not at all."""
    if strategy == "rigid":
        scenario = replace(scenario, checkpoint=CheckpointPolicy(every=None))
    return _Gang(scenario, strategy).simulate()


class _Gang:
    def __init__(self, scenario: Scenario, strategy: Literal["rigid", "restart"]) -> None:
        self._scenario, self._strategy = scenario, strategy
        self._accounts = Accounts()
        self._training = Training(scenario.work, scenario.parameters, scenario.checkpoint, self._accounts)
        self._changes: Iterator[MachineChange] = iter(machine_changes(scenario.pools))
        self._next: MachineChange | None = next(self._changes, None)
        self._available: set[Machine] = set()
        self._now = 0.0
        self._limit = exact(scenario.limit_seconds)
        self._starts = 0

    def simulate(self) -> Outcome:
        provisioned: set[Machine] = set()
        losses, seconds = 0, 0.0
        while not self._training.done and self._wait_for_machines():
            # Machines that are provisioned first: the next job starts on them without delay.
            ranked = sorted(self._available, key=lambda machine: (machine not in provisioned, machine))
            chosen = set(ranked[: self._scenario.maximum])
            new = not chosen <= provisioned
            began = self._now + (exact(self._scenario.parameters.provisioning_seconds) if new else 0.0)
            lost = self._next_loss(chosen, began)
            if began >= self._limit:
                self._now = self._limit
                break
            if lost is not None:  # a machine is lost while it is provisioned
                provisioned.discard(lost)
                continue
            lost = self._run_job(began, chosen, losses, seconds)
            self._starts += 1
            losses, seconds = losses + 1, seconds + self._now - began
            provisioned = {machine for machine in chosen if machine != lost}
        return outcome(
            self._strategy,
            self._scenario,
            self._accounts,
            seconds=self._now,
            steps=self._training.steps,
            lost_steps=self._training.lost_steps,
            rounds=self._starts,
        )

    def _run_job(self, began: float, chosen: set[Machine], losses: int, seconds: float) -> Machine | None:
        """Train until the work is done or a machine is lost; return the lost one."""
        parameters, training, nodes = self._scenario.parameters, self._training, len(chosen)
        start = parameters.start_seconds + parameters.first_step_seconds
        start += parameters.restore_seconds if training.committed else 0.0
        first_step = began + exact(start)
        lost = self._next_loss(chosen, first_step)
        if lost is not None or first_step >= self._limit:
            self._now = min(self._now, self._limit)
            self._accounts.add("starting", (self._now - began) * nodes)
        else:
            self._accounts.add("starting", (first_step - began) * nodes)
            training.begin(first_step, nodes, losses, seconds)
            while not training.advance(min(self._limit, self._next.time if self._next is not None else math.inf)):
                if self._next is None or self._next.time >= self._limit:
                    self._now = self._limit
                    break
                if (lost := self._next_loss(chosen, self._next.time)) is not None:
                    break
            if training.done:
                self._now = training.at + exact(parameters.finish_seconds)
                self._accounts.add("idle", (self._now - training.at) * nodes)
            else:
                training.interrupt(self._now)
                self._accounts.add("lost work", (self._now - training.at) * nodes, "node loss")
                training.roll_back("node loss")
        self._accounts.lives += [Life(f"{pool}-{machine}", pool, began, self._now) for pool, machine in sorted(chosen)]
        return lost

    def _wait_for_machines(self) -> bool:
        """Wait until enough machines are available; return whether they are before the limit."""
        self._next_loss(set(), self._now)
        while len(self._available) < self._scenario.maximum:
            if self._next is None or self._next.time >= self._limit:
                self._now = self._limit
                return False
            self._next_loss(set(), self._next.time)
        return self._now < self._limit

    def _next_loss(self, machines: set[Machine], until: float) -> Machine | None:
        """Apply the changes until a time or, if earlier, until one of these machines is lost, which is returned."""
        while self._next is not None and self._next.time <= until:
            change, self._next = self._next, next(self._changes, None)
            self._now = max(self._now, change.time)
            if change.kind == "up":
                self._available.add(change.machine)
            else:
                self._available.discard(change.machine)
                if change.machine in machines:
                    return change.machine
        self._now = max(self._now, until)
        return None


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


def compare(scenario: Scenario) -> tuple[Outcome, Outcome, Outcome]:
    """Simulate the same work on the same machines with each strategy."""
    return simulate(scenario, "rigid"), simulate(scenario, "restart"), simulate(scenario, "elastic")


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
