"""Execution of one command job: machines, nodes, losses, restarts by the service, results."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from datetime import datetime, timezone

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.machines import Machine
from azureml_elastic.testing.jobs.nodes import CommandJob, Node, Setting, start_node
from azureml_elastic.testing.jobs.runs import NodeState, Verdict, verdict
from azureml_elastic.testing.storage import ARTIFACTS, Location

_POLL_S = 0.03
_TERMINATION_POLL_S = 0.2
_TAIL = 20
_GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL for a cancelled job, as for a stopped container."""


class Execution(threading.Thread):
    """Thread that executes a command job."""

    def __init__(self, job: CommandJob, setting: Setting) -> None:
        super().__init__(name=f"job {job.run.name}")
        self.job = job
        self._setting = setting
        self._nodes: dict[int, Node] = {}
        self._provisioning: dict[int, tuple[Machine, float]] = {}
        self._lock = threading.Lock()
        self._artifacts = Location(ARTIFACTS, f"ExperimentRun/dcid.{job.run.name}")

    def nodes(self) -> dict[int, Node]:
        """Return the running nodes by number."""
        with self._lock:
            return {number: node for number, node in self._nodes.items() if node.exit_code() is None}

    def run(self) -> None:
        """Execute the job until it has ended, and upload its outputs and logs."""
        run = self.job.run
        try:
            run.status = "Queued"
            while (ended := self._attempt()) == "preempted" and self._setting.requeue and not run.cancel.is_set():
                run.attempts += 1
                run.status = "Queued"
            if ended == "preempted":
                run.error = ("PreemptionError", "The machine of this job was preempted.")
            run.status = "Finalizing"
            self._upload()
            run.end("Completed" if ended == "completed" else "Canceled" if run.cancel.is_set() else "Failed")
        except UsageError as error:
            run.end("Failed", ("UserError", str(error)))
        except Exception:  # noqa: BLE001 - a thread's error would be lost, and the job would never end
            run.end("Failed", ("SystemError", traceback.format_exc()))

    def _attempt(self) -> Verdict:
        run, body, machines = self.job.run, self.job.body, self._setting.machines
        while not (taken := machines.take(body.compute, body.nodes)):
            if run.cancel.wait(_POLL_S):
                return "failed"
        available = self._available()
        self._provisioning = {number: (machine, available) for number, machine in enumerate(taken)}
        master = (taken[0].address, _free_port(taken[0].address))
        run.status = "Preparing"
        began = time.monotonic()
        try:
            while True:
                if run.cancel.is_set():
                    self._terminate()
                    return "failed"
                if body.timeout_s is not None and time.monotonic() - began > body.timeout_s:
                    run.cancel.set()
                self._start_provisioned(master)
                current = self._evaluate()
                if current != "running":
                    return current
                run.cancel.wait(_POLL_S)
        finally:
            for number in list(self._nodes):
                self._release(number)
            for machine, _ in self._provisioning.values():
                machines.give_back(machine)
            self._provisioning = {}

    def _available(self) -> float:
        """Return the time on the monotonic clock at which a machine that is requested now can be used."""
        return time.monotonic() + self._setting.machines.pools[self.job.body.compute].provisioning.total_seconds()

    def _terminate(self) -> None:
        for node in self._nodes.values():
            node.terminate()
        until = time.monotonic() + _GRACE_S
        while any(node.is_alive() for node in self._nodes.values()) and time.monotonic() < until:
            time.sleep(_TERMINATION_POLL_S)

    def _start_provisioned(self, master: tuple[str, int]) -> None:
        run, body, now = self.job.run, self.job.body, time.monotonic()
        ready = [number for number, (_, at) in self._provisioning.items() if at <= now]
        # With torch.distributed none could begin without the others, and the timeout of its start would run.
        if not self._nodes and len(ready) < len(self._provisioning):
            return
        for number in ready:
            node = start_node(self.job, self._setting, number, self._provisioning[number][0], master)
            for local, process in enumerate(node.processes):
                # Azure ML numbers the logs of distributed jobs by rank.
                suffix = f"_process_{number * body.processes + local:02d}" if body.distributed else ""
                run.logs.setdefault(f"user_logs/std_log{suffix}.txt", []).append(process.log)
            del self._provisioning[number]
            with self._lock:
                self._nodes[number] = node
        if ready and run.status != "Running":
            run.started = run.started or datetime.now(timezone.utc)
            run.status = "Running"

    def _evaluate(self) -> Verdict:
        """Return the state of the job by its nodes; add nodes where the service itself is elastic."""
        elastic = self._setting.grows and self.job.body.most_nodes > self.job.body.nodes
        states = {number: NodeState(node.exit_code(), node.evicted) for number, node in self._nodes.items()}
        if not states or (self._provisioning and not elastic):
            return "running"
        current = verdict(list(states.values()), replaces=elastic)
        if current == "failed":
            number = next(number for number, state in states.items() if state.exit_code and not state.evicted)
            self.job.run.exit_code = states[number].exit_code
            self.job.run.error = ("UserError", self._failure(number, states[number].exit_code))
        if current == "running" and elastic and not any(state.exit_code == 0 for state in states.values()):
            self._replace(states)
        return current

    def _replace(self, states: dict[int, NodeState]) -> None:
        """Request machines for lost nodes and for further ones up to the maximum."""
        machines, body = self._setting.machines, self.job.body
        for number, state in states.items():
            if state.exit_code is not None:
                self._release(number)
        for number in range(body.most_nodes):
            if number in self._nodes or number in self._provisioning:
                continue
            taken = machines.take(body.compute, 1)
            if not taken:
                return
            self._provisioning[number] = (taken[0], self._available())

    def _release(self, number: int) -> None:
        """Kill a node, upload the outputs on its disk unless the machine is lost, and return the machine."""
        with self._lock:
            node = self._nodes.pop(number)
        node.kill()
        if not node.lost:
            for location, path in node.uploads.items():
                self._setting.mirror.store(location, path)
            if (node.folder / "outputs").is_dir():
                self._setting.mirror.store(self._artifacts / "outputs", node.folder / "outputs")
        self._setting.machines.give_back(node.machine, evicted=node.evicted)

    def _upload(self) -> None:
        run = self.job.run
        for name, location in self.job.outputs.items():
            if self.job.body.outputs[name].mode == "mount":
                self._setting.mirror.store(location)
        for name in run.logs:
            whole = self._setting.root / "logs" / run.name / name
            whole.parent.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(run.log(name))
            self._setting.mirror.store(self._artifacts / name, whole)

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
        # The address belongs to one machine of the workspace at a time, so that hardly anything else takes the port
        # meanwhile.
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
