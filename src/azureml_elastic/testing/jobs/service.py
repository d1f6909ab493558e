"""The service of the local workspace: it runs submitted jobs and evicts their machines."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.body import JobBody, PipelineBody, SweepBody, read_job
from azureml_elastic.testing.jobs.execution import Execution
from azureml_elastic.testing.jobs.machines import Evicted, Eviction, Target, due
from azureml_elastic.testing.jobs.nodes import Node, Setting
from azureml_elastic.testing.jobs.planning import Plan, Planner, step_due
from azureml_elastic.testing.jobs.runs import Run, Runs
from azureml_elastic.testing.jobs.search_space import best_trial
from azureml_elastic.testing.storage import locate

_ARTIFACTS = "azureml://datastores/workspaceartifactstore/paths/ExperimentRun/dcid."
_POLL_S = 0.05
_OUTPUT = re.compile(r"//jobs/([^/]+)/outputs/([^/]+)(?:/(?:paths/)?(.*))?")


@dataclass
class _Sweep:
    """A sweep, and the numbers and points of the trials that are left."""

    body: SweepBody
    left: Iterator[tuple[int, Mapping[str, str]]]
    exhausted: bool = False


class Service(threading.Thread):
    """Thread that starts the steps of pipelines and the trials of sweeps, and evicts machines, until it is closed."""

    def __init__(
        self,
        setting: Setting,
        runs: Runs,
        properties: Callable[[str], Mapping[str, Any] | None],
        metrics: Callable[[str], Mapping[str, Sequence[tuple[int, float]]]],
        evictions: Sequence[Eviction],
    ) -> None:
        super().__init__(name="workspace-service")
        self.setting = setting
        """Objects that all jobs share."""
        self._runs = runs
        self._properties = properties
        self._metrics = metrics
        self._planner = Planner(setting.machines.pools, self._address)
        self._pending = list(evictions)
        self._announced: list[tuple[float, str, Node]] = []
        self._done: list[Evicted] = []
        self._executions: dict[str, Execution] = {}
        self._sweeps: dict[str, _Sweep] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def close(self) -> None:
        """Cancel all runs and wait for their end."""
        with self._lock:
            # Under the lock: a job is either submitted before, and cancelled below, or refused.
            self._closed.set()
        for run in self._runs.all():
            self._runs.cancel(run)
        self.join()  # it starts nothing any more
        for execution in self._executions.values():
            if execution.ident is not None:
                execution.join()
        self._advance()  # what was never started, and then what it belonged to
        self._advance()

    @property
    def evicted(self) -> tuple[Evicted, ...]:
        """Evictions that have happened."""
        with self._lock:
            return tuple(self._done)

    def evict(self, eviction: Eviction) -> None:
        """Plan another eviction."""
        with self._lock:
            self._pending.append(eviction)

    def check(self, properties: dict[str, Any]) -> None:
        """Raise ``UsageError`` if a job with these properties could not be submitted."""
        self._plan("job", properties)

    def submit(self, name: str, properties: dict[str, Any], schedule: str | None = None) -> None:
        """Start a job, given the properties of its document and the schedule that submits it."""
        plan, body = self._plan(name, properties)
        first = plan.runs[0]
        first.schedule = schedule
        with self._lock:
            if self._closed.is_set():
                raise UsageError("The local workspace is closed.")
            self._add(plan)
        if isinstance(body, PipelineBody):
            first.started = datetime.now(timezone.utc)
        else:
            self._start(first)

    def _plan(self, name: str, properties: dict[str, Any]) -> tuple[Plan, JobBody]:
        body = read_job(properties, self._component)
        kind: Any = properties["jobType"]
        display = str(properties.get("displayName") or name)
        first = Run(name, kind, display, str(properties.get("experimentName") or "Default"), properties)
        return self._planner.plan(first, body), body

    def _add(self, plan: Plan) -> None:
        self._executions.update({name: Execution(job, self.setting) for name, job in plan.jobs.items()})
        for name, body in plan.sweeps.items():
            self._sweeps[name] = _Sweep(body, enumerate(islice(body.space.points(), body.most_trials)))
        self._runs.add(*plan.runs)

    def _start(self, run: Run) -> None:
        run.begun = True
        if run.kind == "Command":
            self._executions[run.name].start()
        else:
            run.status = "Queued"

    def _component(self, resource: str) -> Mapping[str, Any]:
        found = self._properties(resource)
        if found is None:
            raise UsageError(f"The component {resource!r} is not in the local workspace. Register it first.")
        spec: Mapping[str, Any] = found["componentSpec"]
        return spec

    def _address(self, resource: str) -> str | None:
        if match := _OUTPUT.fullmatch(resource):
            run = self._runs.get(match[1])
            held = {} if run is None else {"artifacts": ("", f"{_ARTIFACTS}{run.name}"), **run.outputs}
            return f"{held[match[2]][1].rstrip('/')}/{match[3] or ''}" if match[2] in held else None
        found = self._properties(resource) or {}
        address = found.get("codeUri") or found.get("dataUri") or found.get("modelUri")
        if address is not None and str(address).startswith("azureml://jobs/"):
            return self._address(str(address).removeprefix("azureml:"))
        return None if address is None else str(address)

    def run(self) -> None:
        """Start what is due, and carry out the evictions that are due."""
        while not self._closed.wait(_POLL_S):
            self._advance()
            now = time.monotonic()
            for at, event, node in list(self._announced):
                left = node.exit_code() is not None
                if at <= now or left:
                    self._announced.remove((at, event, node))
                    # Before the kill: as soon as the node has ended, the job's thread uploads what is on its disk
                    # unless it is lost.
                    node.lost = not left
                    node.kill()
                    self.setting.metadata.remove(event)
            with self._lock:
                pending = list(self._pending)
            if pending:
                self._evict(pending)

    def _advance(self) -> None:
        with self._lock:
            sweeps = dict(self._sweeps)
        for name, sweep in sweeps.items():
            run = self._runs.get(name)
            if run is not None and run.begun and not run.over.is_set():
                self._advance_sweep(run, sweep)
        for run in self._runs.all():
            if run.kind == "Pipeline" and not run.over.is_set():
                self._advance_pipeline(run)

    def _advance_pipeline(self, pipeline: Run) -> None:
        inside = [run for run in self._runs.below(pipeline) if not run.trial]
        states = {run.name: self._runs.status(run) for run in inside}
        steps = [run for run in inside if run.kind != "Pipeline"]
        # Azure ML's default: the first failed step cancels all others.
        failed = not pipeline.continues_on_failure and any(states[run.name] == "Failed" for run in steps)
        stops = failed or pipeline.cancel.is_set()
        for run in steps:
            reads, cancelled = [states[name] for name in run.reads], run.cancel.is_set()
            match step_due(states[run.name], reads, started=run.begun, cancelled=cancelled, stops=stops):
                case "start":
                    self._start(run)
                case "cancel":
                    self._runs.cancel(run)
                case "skip":
                    run.end("Canceled")
        for run in reversed(inside):  # the inner ones first
            children = self._runs.children(run.name)
            if run.kind != "Pipeline" or run.over.is_set():
                continue
            began = [child.started for child in children if child.started is not None]
            run.started = run.started or (min(began) if began else None)
            if all(child.over.is_set() for child in children):
                run.ended = datetime.now(timezone.utc)
                run.over.set()

    def _advance_sweep(self, run: Run, sweep: _Sweep) -> None:
        trials = self._runs.children(run.name)
        # A sweep has no thread of its own: its state follows from its trials.
        began = [trial.started for trial in trials if trial.started is not None]
        if began and run.status == "Queued":
            run.status = "Running"
        limit = sweep.body.timeout_s
        if limit is not None and began and (datetime.now(timezone.utc) - min(began)).total_seconds() > limit:
            self._runs.cancel(run)
        running = sum(not trial.over.is_set() for trial in trials)
        while running < sweep.body.most_at_once and not (run.cancel.is_set() or sweep.exhausted):
            number, point = next(sweep.left, (0, None))
            sweep.exhausted = point is None
            if point is None:
                break
            plan = self._planner.plan_trial(run, sweep.body, number, point)
            running += 1
            with self._lock:
                self._add(plan)
            self._start(plan.runs[0])
        if not running and (run.cancel.is_set() or sweep.exhausted):
            self._end_sweep(run, sweep.body)

    def _end_sweep(self, run: Run, body: SweepBody) -> None:
        trials = self._runs.children(run.name)
        completed = [trial.name for trial in trials if trial.status == "Completed"]
        values = {name: [value for _, value in self._metrics(name).get(body.metric, ())] for name in completed}
        run.best = best_trial(values, maximize=body.maximize)
        best = None if run.best is None else self._runs.get(run.best[0])
        if best is not None:
            self._hand_on(best, run)
        run.end("Canceled" if run.cancel.is_set() else "Completed" if completed else "Failed")

    def _hand_on(self, trial: Run, sweep: Run) -> None:
        """Copy the outputs of the best trial to where those of its sweep are read."""
        for name, (_, uri) in sweep.outputs.items():
            written, target = locate(trial.outputs[name][1], self._address), locate(uri, self._address)
            if written != target:
                self.setting.mirror.copy(written, self.setting.mirror.path(target))
                self.setting.mirror.store(target)

    def _evict(self, pending: list[Eviction]) -> None:
        targets, nodes = {}, {}
        for run in self._runs.all():
            found = self._nodes(run)
            steps = [node.step for _, node in found.values()]
            started = [record.started for record in self._runs.commands(run) if record.started is not None]
            if not found or not started:
                continue
            seconds = (datetime.now(timezone.utc) - min(started)).total_seconds()
            able = frozenset(
                number
                for number, (_, node) in found.items()
                if node.machine.tier == "low_priority" and not node.evicted
            )
            targets[run.name] = Target(seconds, max(steps), able)
            nodes[run.name] = found
        for eviction, name in due(pending, targets):
            job, node = nodes[name][eviction.node]
            # Before the announcement or the kill: the job's thread would take the exit code for a failure of the
            # program.
            node.evicted = True
            if notice := eviction.notice.total_seconds():
                event = self.setting.metadata.announce("Preempt", node.machine.name, notice=notice)
                self._announced.append((time.monotonic() + notice, event, node))
            else:
                node.lost = True
                node.kill()
            with self._lock:
                self._pending.remove(eviction)
                self._done.append(Evicted(eviction, job, node.machine.name, targets[name].step, time.time()))

    def _nodes(self, run: Run) -> dict[int, tuple[str, Node]]:
        """Return the running nodes of a submitted job by number, each with the name of the run that it executes.

        The nodes of its commands are numbered one after the other, whether they run or not.
        """
        found = {}
        first = 0
        for command in self._runs.commands(run):
            execution = self._executions.get(command.name)
            if execution is None:
                continue
            for number, node in execution.nodes().items():
                found[first + number] = (command.name, node)
            first += execution.job.body.most_nodes
        return found
