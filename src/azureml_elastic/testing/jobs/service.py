"""The service of the local workspace: it runs submitted jobs and evicts their machines."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.api.body import CommandBody, read_job
from azureml_elastic.testing.jobs.evictions import Evicted, Eviction, Target, due
from azureml_elastic.testing.jobs.execution import Execution
from azureml_elastic.testing.jobs.nodes import CommandJob, Node, Setting
from azureml_elastic.testing.jobs.runs import Run, Runs
from azureml_elastic.testing.storage.locations import Location, locate

__all__ = ["Service"]

_POLL_S = 0.05


class Service(threading.Thread):
    """Thread that evicts machines and stops failed pipelines; runs submitted jobs until it is closed."""

    def __init__(
        self,
        setting: Setting,
        runs: Runs,
        properties: Callable[[str], Mapping[str, Any] | None],
        evictions: Sequence[Eviction],
    ) -> None:
        super().__init__(name="workspace-service")
        self.setting = setting
        """Objects that all jobs share."""
        self._runs = runs
        self._properties = properties
        self._pending = list(evictions)
        self._announced: list[tuple[float, str, Node]] = []
        self._done: list[Evicted] = []
        self._executions: dict[str, Execution] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def close(self) -> None:
        """Cancel all runs and wait for their end."""
        for run in self._runs.all():
            self._runs.cancel(run)
        with self._lock:
            executions = list(self._executions.values())
        for execution in executions:
            execution.join()
        self._closed.set()
        self.join()

    @property
    def evicted(self) -> tuple[Evicted, ...]:
        """Evictions that have happened."""
        with self._lock:
            return tuple(self._done)

    def evict(self, eviction: Eviction) -> None:
        """Plan another eviction."""
        with self._lock:
            self._pending.append(eviction)

    def submit(self, name: str, properties: dict[str, Any]) -> None:
        """Start a job, given the properties of its document."""
        body = read_job(properties, self._component)
        first = Run(
            name,
            "Command" if isinstance(body, CommandBody) else "Pipeline",
            str(properties.get("displayName") or name),
            str(properties.get("experimentName") or "Default"),
            properties,
        )
        if isinstance(body, CommandBody):
            executions = [self._execution(first, body)]
        else:
            first.started = datetime.now(timezone.utc)
            executions = [
                self._execution(_run_of_step(first, number, step, command), command)
                for number, (step, command) in enumerate(body.steps.items())
            ]
        with self._lock:
            if self._closed.is_set():
                raise UsageError("The local workspace is closed.")
            self._executions.update({execution.job.run.name: execution for execution in executions})
        self._runs.add(first, *(execution.job.run for execution in executions))
        for execution in executions:
            execution.start()

    def _execution(self, run: Run, body: CommandBody) -> Execution:
        """Resolve a command's pool and data."""
        pool = self.setting.machines.pools.get(body.compute)
        if pool is None:
            raise UsageError(f"The local workspace has no compute {body.compute!r}. Give it one by pools= or --pool.")
        if body.nodes > pool.nodes:
            raise UsageError(
                f"The job requests {body.nodes} nodes at once, above the limit of {pool.nodes} of the compute "
                f"{body.compute!r}; it would wait for ever. Give the pool more nodes, or the job fewer."
            )
        outputs: dict[str, Location] = {}
        for name, output in body.outputs.items():
            uri = output.uri or f"azureml://datastores/workspaceblobstore/paths/azureml/{run.name}/{name}/"
            outputs[name] = locate(uri, self._address)
            run.outputs[name] = (output.type, uri)
        inputs = {
            name: locate(value.uri, self._address) for name, value in body.inputs.items() if value.uri is not None
        }
        code = None if body.code is None else locate(body.code, self._address)
        return Execution(CommandJob(run, body, code, inputs, outputs), self.setting)

    def _component(self, resource: str) -> Mapping[str, Any]:
        found = self._properties(resource)
        if found is None:
            raise UsageError(f"The component {resource!r} is not in the local workspace. Register it first.")
        spec: Mapping[str, Any] = found["componentSpec"]
        return spec

    def _address(self, resource: str) -> str | None:
        found = self._properties(resource) or {}
        address = found.get("codeUri") or found.get("dataUri") or found.get("modelUri")
        return None if address is None else str(address)

    def run(self) -> None:
        """Carry out the evictions that are due, and stop the steps of failed pipelines."""
        while not self._closed.wait(_POLL_S):
            self._stop_failed_pipelines()
            now = time.monotonic()
            for at, event, node in list(self._announced):
                left = node.exit_code() is not None
                if at <= now or left:
                    self._announced.remove((at, event, node))
                    node.lost = not left
                    node.kill()
                    self.setting.metadata.remove(event)
            with self._lock:
                pending = list(self._pending)
            if pending:
                self._evict(pending)

    def _evict(self, pending: list[Eviction]) -> None:
        targets, nodes = {}, {}
        for run in self._runs.all():
            found = self._nodes(run)
            steps = [node.step for _, node in found.values()]
            records = [run] if run.kind == "Command" else self._runs.children(run.name)
            started = [record.started for record in records if record.started is not None]
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
            node.evicted = True
            if eviction.notice_s:
                event = self.setting.metadata.announce("Preempt", node.machine.name, notice=eviction.notice_s)
                self._announced.append((time.monotonic() + eviction.notice_s, event, node))
            else:
                node.lost = True
                node.kill()
            with self._lock:
                self._pending.remove(eviction)
                self._done.append(Evicted(eviction, job, node.machine.name, targets[name].step, time.time()))

    def _nodes(self, run: Run) -> dict[int, tuple[str, Node]]:
        """Return the running nodes of a submitted job by number, each with the name of the run that it executes."""
        with self._lock:
            executions = dict(self._executions)
        if run.kind == "Command":
            return {number: (run.name, node) for number, node in executions[run.name].nodes().items()}
        found = {}
        for child in self._runs.children(run.name):
            for node in executions[child.name].nodes().values():
                found[child.number] = (child.name, node)
        return found

    def _stop_failed_pipelines(self) -> None:
        for run in self._runs.all():
            if run.kind != "Pipeline" or run.over.is_set():
                continue
            children = self._runs.children(run.name)
            if not run.continues_on_failure and any(child.status == "Failed" for child in children):
                self._runs.cancel_children(run)
            if all(child.over.is_set() for child in children):
                run.ended = datetime.now(timezone.utc)
                run.over.set()


def _run_of_step(pipeline: Run, number: int, name: str, body: CommandBody) -> Run:
    document = {
        "jobType": "Command",
        "command": body.command,
        "computeId": f"azureml:{body.compute}",
        "displayName": name,
        "experimentName": pipeline.experiment,
        "environmentVariables": dict(body.environment_variables),
        "resources": {"instanceCount": body.nodes},
        "inputs": {},
        "outputs": {},
        "properties": {},
        "tags": {},
    }
    unique = f"{pipeline.name}-{name}-{secrets.token_hex(4)}"
    return Run(unique, "Command", name, pipeline.experiment, document, parent=pipeline.name, number=number)
