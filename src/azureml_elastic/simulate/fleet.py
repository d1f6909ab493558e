"""An elastic run on pools of machines: its node jobs, replaced by the decisions of the replacement policy itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from azureml_elastic.config.resources import first_nodes, step_names
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.replacement.policy import JobState, NodeJob, Start, decide, limit_reached, next_change
from azureml_elastic.simulate.accounts import exact
from azureml_elastic.simulate.elastic import ElasticRun, Timers
from azureml_elastic.simulate.scenario import Machine, MachineChange, Outcome, Scenario, machine_changes, outcome

_LONG_AGO = 7200.0
"""Seconds after which the policy decides the same however long ago a job has ended, or ``fallback_after`` if longer."""

_END_OF_TIME = 1e12
"""Time from which the ages of such jobs are counted: they keep their order, and need not be aged at each check."""


@dataclass
class _Job:
    """A node job. Its machine is set from the allocation on, ``began`` when its process starts."""

    pool: int
    number: int
    name: str
    first: bool
    submitted: float
    state: JobState = "waiting"
    machine: Machine | None = None
    began: float | None = None
    ended: float | None = None
    stopped: bool = False
    running: NodeJob | None = None  # what was observed of it first while it ran

    def observed(self, now: float) -> NodeJob:
        """Return what the replacement policy knows of the job."""
        began = now if self.began is None else self.began
        ended = now if self.ended is None else self.ended
        return NodeJob(
            self.pool,
            self.number,
            self.name,
            self.state,
            first=self.first,
            waited_s=now - self.submitted if self.state == "waiting" else 0.0,
            ran_s=ended - began,
            ended_s=now - ended,
            stopped=self.stopped,
        )


def simulate_elastic(scenario: Scenario) -> Outcome:
    """Simulate an elastic run, the jobs of which are replaced as by ``azureml-elastic replace-nodes``."""
    return _Fleet(scenario).simulate()


class _Fleet:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._pools = [pool.pool for pool in scenario.pools]
        self._stems = step_names(self._pools)
        limits = Limits(scenario.minimum, scenario.maximum)
        self._run = ElasticRun(
            scenario.work, limits, scenario.parameters, scenario.checkpoint, timings=scenario.timings
        )
        self._provisioning = exact(scenario.parameters.provisioning_seconds)
        self._interval = exact(scenario.replacement.interval.total_seconds())
        self._jobs: dict[str, _Job] = {}
        self._recent: dict[str, _Job] = {}  # jobs of which time may still change what the policy decides
        self._old: list[NodeJob] = []
        self._available: set[Machine] = set()
        self._used: dict[Machine, _Job] = {}
        self._provisioned = Timers()
        self._look_at = self._interval
        self._settled = 0

    def simulate(self) -> Outcome:
        run, scenario = self._run, self._scenario
        changes = machine_changes(scenario.pools, scenario.parameters.notice_seconds)
        limit = exact(scenario.limit_seconds)
        for pool, count in enumerate(first_nodes(self._pools, scenario.maximum)):
            for number in range(count):
                self._submit(pool, number, first=True)
        position = 0
        while not run.over and run.now < limit:
            change = changes[position].time if position < len(changes) else math.inf
            run.advance(min(change, self._provisioned.next, self._look_at, limit))
            self._settle()
            while not run.over and position < len(changes) and changes[position].time <= run.now:
                self._apply(changes[position])
                position += 1
            while not run.over and self._provisioned.next <= run.now:
                self._provisioned.fire()
            if not run.over and self._look_at <= run.now:
                self._look()
            self._allot()
        why = limit_reached(self._pools, scenario.maximum, self._observed(), scenario.replacement)
        if not run.over:
            run.stop()
        return outcome(
            "elastic",
            scenario,
            run.accounts,
            seconds=run.now,
            steps=run.training.steps,
            lost_steps=run.training.lost_steps,
            rounds=run.rounds,
            why=why,
        )

    def _observed(self) -> list[NodeJob]:
        """Return what the replacement policy knows of the jobs."""
        now = self._run.now
        long_ago = now - max(_LONG_AGO, self._scenario.replacement.fallback_after.total_seconds())
        for job in [job for job in self._recent.values() if job.ended is not None and job.ended < long_ago]:
            del self._recent[job.name]
            # Jobs only get more, and each check would look at all of them: those whose age no longer matters are kept
            # as they are.
            self._old.append(replace(job.observed(now), ended_s=_END_OF_TIME - (job.ended or 0.0)))
        # Only a budget looks at how long a running node has run: without one a thousand of them are not observed anew
        # at each check.
        aged = self._scenario.replacement.budget is not None
        found = self._old.copy()
        for job in self._recent.values():
            if aged or job.state != "running":
                found.append(job.observed(now))
            else:
                job.running = job.running or job.observed(now)
                found.append(job.running)
        return found

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _submit(self, pool: int, number: int, *, first: bool) -> None:
        name = f"{self._stems[pool]}-{number}"
        self._jobs[name] = self._recent[name] = _Job(pool, number, name, first, self._run.now)

    def _look(self) -> None:
        """Submit and cancel jobs as the replacement policy decides."""
        policy = self._scenario.replacement
        jobs = self._observed()
        actions = decide(self._pools, self._scenario.maximum, jobs, policy)
        acted = False
        for action in actions:
            if isinstance(action, Start):
                self._submit(action.pool, action.number, first=False)
                acted = True
            elif not self._jobs[action.job.name].stopped:
                self._cancel(self._jobs[action.job.name])
                acted = True
        self._look_after(self._interval if acted else next_change(self._pools, jobs, policy))

    def _look_after(self, seconds: float) -> None:
        """Look at the first check that is at least these seconds later."""
        now = self._run.now
        checks = math.inf if math.isinf(seconds) else max(1, math.ceil(seconds / self._interval))
        self._look_at = math.inf if math.isinf(checks) else (now // self._interval + checks) * self._interval

    def _changed(self) -> None:
        """Note that the policy may decide otherwise at its next check."""
        self._look_at = min(self._look_at, (self._run.now // self._interval + 1) * self._interval)

    def _cancel(self, job: _Job) -> None:
        job.stopped = True
        if job.state == "running":
            self._run.leave(job.name)
        else:
            job.ended = self._run.now
            self._release(job)
        job.state = "cancelled"

    def _settle(self) -> None:
        """Record the nodes whose process has ended."""
        # Processes end inside the run, which knows no jobs: those that are new in its accounts are read here.
        for life in self._run.accounts.lives[self._settled :]:
            job = self._jobs[life.node]
            job.ended = life.ended
            job.state = "cancelled" if job.stopped else "ended"
            self._release(job)
            self._changed()
        self._settled = len(self._run.accounts.lives)

    # --- machines ----------------------------------------------------------------------------------------------------

    def _apply(self, change: MachineChange) -> None:
        machine, job = change.machine, self._used.get(change.machine)
        if change.kind == "up":
            self._available.add(machine)
            return
        self._available.discard(machine)
        if job is None:
            return
        if job.began is None:
            self._release(job)  # it goes on waiting for another one
        elif job.name in self._run.nodes:
            if change.kind == "notice":
                self._run.preempt(job.name, self._scenario.parameters.notice_seconds)
                self._changed()
            else:
                self._run.lose(job.name)
        self._settle()

    def _allot(self) -> None:
        """Give free machines to waiting jobs, in the order of their submission."""
        waiting = [job for job in self._recent.values() if job.state == "waiting" and job.machine is None]
        if not waiting:
            return
        free = sorted(self._available - self._used.keys())
        for job in waiting:
            machine = next((each for each in free if each[0] == job.pool), None)
            if machine is not None:
                free.remove(machine)
                job.machine, self._used[machine] = machine, job
                self._provisioned.add(self._run.now + self._provisioning, partial(self._start, job, machine))

    def _start(self, job: _Job, machine: Machine) -> None:
        if job.state == "waiting" and job.machine == machine:
            job.state, job.began = "running", self._run.now
            self._run.add(job.name, job.pool)
            self._changed()

    def _release(self, job: _Job) -> None:
        if job.machine is not None:
            self._used.pop(job.machine, None)
            job.machine = None
