"""Runs of a fixed number of nodes: one that starts from scratch after a loss, and one that restarts from a checkpoint.

They are treated favourably: nodes that wait for the last one are not billed, and a failed job is submitted again at
once, to the machines that are still there without provisioning them again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.simulate.accounts import Accounts, Life, exact
from azureml_elastic.simulate.scenario import Machine, MachineChange, Outcome, Scenario, machine_changes, outcome
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
        counts = Counter(pool for pool, _ in chosen)
        self._accounts.lives += [Life("", pool, began, self._now, count) for pool, count in sorted(counts.items())]
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
