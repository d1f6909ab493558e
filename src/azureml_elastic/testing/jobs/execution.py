"""Execution of one command job: machines, nodes, losses, restarts by the service, results."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from azureml_elastic.errors import UsageError
from azureml_elastic.local.faults.metadata_service import MetadataService
from azureml_elastic.local.processes import NodeProcesses
from azureml_elastic.testing.api.body import CommandBody
from azureml_elastic.testing.jobs.machines import Machine, Machines
from azureml_elastic.testing.jobs.node_environment import JobProcess, Site
from azureml_elastic.testing.jobs.nodes import Bindings, Node, start_node
from azureml_elastic.testing.jobs.runs import Run
from azureml_elastic.testing.jobs.verdicts import NodeState, Verdict, verdict
from azureml_elastic.testing.storage.account import ARTIFACTS
from azureml_elastic.testing.storage.locations import Location
from azureml_elastic.testing.storage.mirror import Mirror

__all__ = ["Execution", "Setting"]

_POLL_S = 0.03
_LOOK_S = 0.2
_TAIL = 20
_GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL for a cancelled job, as for a stopped container."""


@dataclass(frozen=True)
class Setting:
    """Shared objects of all executions.

    Args:
        site: workspace of the nodes.
        machines: machines of all pools.
        processes: context in which node processes are started.
        mirror: blobs of the storage account as files.
        metadata: metadata service of the machines.
        root: parent folder of the machines' folders.
        requeue: whether a preempted job is restarted from the beginning.
    """

    site: Site
    machines: Machines
    processes: NodeProcesses
    mirror: Mirror
    metadata: MetadataService
    root: Path
    requeue: bool


class Execution:
    """Execution of a command job on a thread of its own.

    Args:
        run: record of the run.
        body: command to execute.
        bindings: locations of code, inputs and outputs.
        setting: shared objects of all executions.
    """

    def __init__(self, run: Run, body: CommandBody, bindings: Bindings, setting: Setting) -> None:
        self.run = run
        self._body = body
        self._bindings = bindings
        self._setting = setting
        self._nodes: dict[int, Node] = {}
        self._coming: dict[int, tuple[Machine, float]] = {}
        self._lock = threading.Lock()
        self._port = 0
        self._thread = threading.Thread(target=self._live, name=f"job {run.name}")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def nodes(self) -> dict[int, Node]:
        """Return the running nodes by number."""
        with self._lock:
            return {number: node for number, node in self._nodes.items() if node.exit_code() is None}

    def _live(self) -> None:
        run = self.run
        try:
            run.status = "Queued"
            while (ended := self._attempt()) == "preempted" and self._setting.requeue and not run.cancel.is_set():
                run.attempts += 1
                run.status = "Queued"
            if ended == "preempted":
                run.error = ("PreemptionError", "The machine of this job was preempted.")
            run.status = "Finalizing"
            self._upload()
            run.ended = datetime.now(timezone.utc)
            run.status = "Completed" if ended == "completed" else "Canceled" if run.cancel.is_set() else "Failed"
        except UsageError as error:
            self._broken("UserError", str(error))
        except Exception:  # noqa: BLE001 - a thread's error would be lost, and the job would never end
            self._broken("SystemError", traceback.format_exc())
        finally:
            run.over.set()

    def _broken(self, code: str, message: str) -> None:
        self.run.error = (code, message)
        self.run.ended = datetime.now(timezone.utc)
        self.run.status = "Failed"

    def _attempt(self) -> Verdict:
        """Run the job once on new machines; a cancelled attempt counts as failed."""
        body, machines = self._body, self._setting.machines
        taken = machines.take(body.compute, body.nodes, self.run.cancel.is_set)
        if taken is None:
            return "failed"
        pool = machines.pool(body.compute)
        assert pool is not None
        self._coming = dict(enumerate((machine, time.monotonic() + pool.provisioning_s) for machine in taken))
        first = taken[0].address
        self._port = _free_port(first)
        self.run.status = "Preparing"
        began = time.monotonic()
        try:
            while True:
                if self.run.cancel.is_set():
                    self._terminate()
                    return "failed"
                if body.timeout_s is not None and time.monotonic() - began > body.timeout_s:
                    self.run.cancel.set()
                self._arrive(first)
                current = self._look()
                if current != "running":
                    return current
                self.run.cancel.wait(_POLL_S)
        finally:
            self._clear()

    def _terminate(self) -> None:
        """Send SIGTERM to all nodes and wait for the grace period."""
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.terminate()
        until = time.monotonic() + _GRACE_S
        while any(node.is_alive() for node in nodes) and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _arrive(self, first: str) -> None:
        """Start the nodes whose machines are provisioned; the initial ones start together."""
        now = time.monotonic()
        ready = [number for number, (_, at) in self._coming.items() if at <= now]
        if not self._nodes and len(ready) < len(self._coming):
            return
        for number in ready:
            machine, _ = self._coming[number]
            node = self._start(number, machine, first)
            del self._coming[number]
            with self._lock:
                self._nodes[number] = node
        if ready and self.run.status != "Running":
            self.run.started = self.run.started or datetime.now(timezone.utc)
            self.run.status = "Running"

    def _start(self, number: int, machine: Machine, first: str) -> Node:
        run, setting = self.run, self._setting
        member = JobProcess(
            run=run.name,
            root=run.root,
            experiment=run.experiment,
            attempt=run.attempts,
            number=number,
            local=0,
            first=first,
            port=self._port,
            machine=machine,
            events=setting.metadata.address(machine.name),
        )
        node = start_node(
            self._body,
            self._bindings,
            member,
            site=setting.site,
            mirror=setting.mirror,
            processes=setting.processes,
            root=setting.root,
        )
        for local, process in enumerate(node.processes):
            many = self._body.distributed
            rank = number * self._body.processes + local
            name = f"user_logs/std_log_process_{rank:02d}.txt" if many else "user_logs/std_log.txt"
            run.logs.setdefault(name, []).append(process.log)
        return node

    def _look(self) -> Verdict:
        """Evaluate the nodes that have ended, and add nodes where the service is elastic itself."""
        elastic = self._body.most_nodes > self._body.nodes
        states = {number: NodeState(node.exit_code(), node.taken) for number, node in self._nodes.items()}
        if not states or (self._coming and not elastic):
            return "running"
        current = verdict(list(states.values()), replaces=elastic)
        if current == "failed":
            number = next(number for number, state in states.items() if state.exit_code and not state.taken)
            self.run.error = ("UserError", self._failure(number, states[number].exit_code))
        if current == "running" and elastic and not any(state.exit_code == 0 for state in states.values()):
            self._replace(states)
        return current

    def _replace(self, states: dict[int, NodeState]) -> None:
        """Request machines for lost nodes and for further ones up to the maximum."""
        machines = self._setting.machines
        pool = machines.pool(self._body.compute)
        assert pool is not None
        for number, state in states.items():
            if state.exit_code is not None:
                self._release(number)
        for number in range(self._body.most_nodes):
            if number in self._nodes or number in self._coming:
                continue
            machine = machines.try_take(self._body.compute)
            if machine is None:
                return
            self._coming[number] = (machine, time.monotonic() + pool.provisioning_s)

    def _release(self, number: int) -> None:
        with self._lock:
            node = self._nodes.pop(number)
        node.kill()
        if not node.gone:
            self._keep(node)
        self._setting.machines.give_back(node.machine, evicted=node.taken)

    def _clear(self) -> None:
        for number in list(self._nodes):
            self._release(number)
        for machine, _ in self._coming.values():
            self._setting.machines.give_back(machine)
        self._coming = {}

    def _keep(self, node: Node) -> None:
        """Upload the outputs on a node's own disk, which an evicted machine loses."""
        for location, path in node.uploads.items():
            self._setting.mirror.store(location, path)
        artifacts = Location(ARTIFACTS, f"ExperimentRun/dcid.{self.run.name}/outputs")
        if (node.folder / "outputs").is_dir():
            self._setting.mirror.store(artifacts, node.folder / "outputs")

    def _upload(self) -> None:
        """Upload mounted outputs and the logs."""
        for name, location in self._bindings.outputs.items():
            if self._body.outputs[name].mode == "mount":
                self._setting.mirror.store(location)
        folder = Location(ARTIFACTS, f"ExperimentRun/dcid.{self.run.name}")
        for name in self.run.logs:
            whole = self._setting.root / "logs" / self.run.name / name
            whole.parent.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(self.run.log(name))
            self._setting.mirror.store(folder / name, whole)

    def _failure(self, number: int, exit_code: int | None) -> str:
        node = self._nodes[number]
        lines: list[str] = []
        for process in node.processes:
            with contextlib.suppress(OSError):
                lines += process.log.read_text(errors="replace").splitlines()
        output = "\n".join(lines[-_TAIL:]) or "none"
        return (
            f"Execution failed. The command on node {number} ({node.machine.name}) exited with status code "
            f"{exit_code}. Its last output:\n{output}"
        )


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
