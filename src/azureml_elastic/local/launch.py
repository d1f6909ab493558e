"""One run of a local cluster, from the first node's start to the last one's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from azureml_elastic.config import Plan
from azureml_elastic.ledger.events import Event
from azureml_elastic.ledger.reading import EventReader, LineReader
from azureml_elastic.ledger.summary import (
    FaultRecord,
    NodeEnding,
    NodeSummary,
    Paths,
    Report,
    RunState,
    audit_folder,
    summarise,
)
from azureml_elastic.local.board import Board
from azureml_elastic.local.faults.model import Add, Freeze, Kill, Preempt, Schedule, TableTrouble
from azureml_elastic.local.faults.schedule import ChaosState, Due, due, may_add
from azureml_elastic.local.processes import NodeProcess, NodeProcesses
from azureml_elastic.local.run_end import TIMED_OUT, NodeStatus, RunEnd, outcome_of, phase
from azureml_elastic.local.settings import TableChoice, node_environment
from azureml_elastic.local.view import View

__all__ = ["Launch"]

_POLL_S = 0.03


@dataclass
class _Node:
    """A started node and the faults injected into it."""

    process: NodeProcess
    output: LineReader
    done_to_it: NodeEnding | None = None
    exit_code: int | None = None
    leftovers: int = 0
    last_line: str = ""
    frozen: bool = False
    frozen_for_good: bool = False

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def status(self) -> NodeStatus:
        ending: NodeEnding = "running"
        if self.exit_code is not None:
            ending = self.done_to_it or "exited"
        elif self.frozen_for_good:
            ending = "frozen"
        return NodeStatus(self.name, ending, self.exit_code, self.process.log, self.last_line)


@dataclass(order=True)
class _Timer:
    """An action at a later time: the second half of a fault."""

    at: float
    action: Callable[[], None] = field(compare=False)


class Launch:
    """Start the nodes, watch them and inject the faults.

    Args:
        plan: plan that the nodes receive.
        table: table of the run.
        paths: files of the run.
        command: command that starts a node.
        processes: context in which the nodes are started.
        schedule: faults to inject.
        view: view that shows the run; ``None`` for no output.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        table: TableChoice,
        paths: Paths,
        command: Sequence[str],
        processes: NodeProcesses,
        schedule: Schedule,
        view: View | None,
    ) -> None:
        self._plan = plan
        self._table = table
        self._paths = paths
        self._command = command
        self._processes = processes
        self._schedule = schedule
        self._view = view
        self._nodes: dict[str, _Node] = {}
        self._board = Board()
        self._reader = EventReader(paths.events)
        self._events: list[Event] = []
        self._timers: list[_Timer] = []
        self._fired: frozenset[int] = frozenset()
        self._sealed_at: float | None = None
        self._faults: list[FaultRecord] = []
        self._losses: list[tuple[str, float]] = []

    def watch(self, count: int, timeout_s: float | None, exit_grace_s: float) -> RunEnd:
        """Start the nodes and return when the run is over; nodes that did not exit in time may still be running."""
        started = time.monotonic()
        ending_since: float | None = None
        self._start(count)
        while True:
            self._look()
            state = self._chaos_state()
            statuses = [node.status for node in self._nodes.values()]
            more = may_add(self._schedule, state)
            now = time.monotonic()
            current = phase(statuses, self._board.ended, more_to_come=more)
            if current == "ending":
                ending_since = now if ending_since is None else ending_since
                if now - ending_since > exit_grace_s:
                    return self._ending()
            elif current == "over":
                return self._ending()
            else:
                for decision in due(self._schedule, state):
                    self._inject(decision)
            for timer in sorted(timer for timer in self._timers if timer.at <= now):
                self._timers.remove(timer)
                timer.action()
            if timeout_s is not None and now - started > timeout_s:
                message = f"The run was stopped after {timeout_s:g} s, the limit that --timeout set, at step "
                return RunEnd("failed", TIMED_OUT, f"{message}{self._board.step}. The nodes' logs: {self._paths.logs}")
            time.sleep(_POLL_S)

    def stop_all(self) -> None:
        """Kill the remaining processes, and read the last events and output."""
        for node in self._nodes.values():
            if node.exit_code is None:
                node.done_to_it = node.done_to_it or ("frozen" if node.frozen_for_good else "stopped")
                node.process.kill()
        self._look()

    def report(self, outcome: RunState, exit_code: int, message: str) -> Report:
        """Return the run's report."""
        return summarise(
            self._events,
            paths=self._paths,
            outcome=outcome,
            exit_code=exit_code,
            message=message,
            run_id=self._plan.run_id or "",
            nodes=[
                NodeSummary(
                    name=node.name, exit_code=node.exit_code, ending=node.status.ending, leftovers=node.leftovers
                )
                for node in self._nodes.values()
            ],
            faults=self._faults,
            audit=audit_folder(self._paths, self._events) if self._plan.audit else None,
            losses=self._losses,
            skipped_events=self._reader.skipped,
        )

    def _ending(self) -> RunEnd:
        statuses = [node.status for node in self._nodes.values()]
        return outcome_of(statuses, self._board.ended, self._board.failure)

    def _start(self, count: int) -> tuple[str, ...]:
        names = tuple(f"node-{len(self._nodes) + index}" for index in range(count))
        for name in names:
            environment = node_environment(name, self._plan, self._table, self._paths)
            process = self._processes.start(name, self._command, environment)
            self._nodes[name] = _Node(process, LineReader(process.log))
            self._board.add(name)
        return names

    def _look(self) -> None:
        """Read new events, output and exit codes."""
        for node in self._nodes.values():
            code = node.process.exit_code()
            if code is not None and node.exit_code is None:
                node.exit_code = code
                # A lost machine takes all its processes along; so must a node.
                left = node.process.kill()
                node.leftovers = 0 if node.done_to_it == "killed" else left
                self._board.set_state(node.name, _state_after(node.done_to_it, code), alive=False)
        fresh = sorted(self._reader.read(), key=lambda event: event.time)  # one machine, one clock
        self._events += fresh
        self._board.apply(fresh)
        if self._sealed_at is None and self._board.round:
            self._sealed_at = time.monotonic()
        for node in self._nodes.values():
            lines = [line.decode("utf-8", "replace") for line in node.output.read()]
            node.last_line = next((line for line in reversed(lines) if line.strip()), node.last_line)
            if self._view is not None and lines:
                self._view.output(node.name, lines)
        if self._view is not None:
            self._view.events(self._board, fresh)

    def _chaos_state(self) -> ChaosState:
        nodes = self._nodes.values()
        return ChaosState(
            step=self._board.step,
            seconds=None if self._sealed_at is None else time.monotonic() - self._sealed_at,
            living=frozenset(
                node.name for node in nodes if node.exit_code is None and node.done_to_it is None and not node.frozen
            ),
            gone=frozenset(node.name for node in nodes if node.exit_code is not None),
            rank0=self._board.rank0,
            fired=self._fired,
        )

    def _inject(self, decision: Due) -> None:
        """Carry out a fault."""
        self._fired |= {decision.index}
        fault = decision.fault
        hit: tuple[str, ...] = ()
        if isinstance(fault, Add):
            hit = self._start(fault.count)
        elif isinstance(fault, TableTrouble):
            self._disturb(fault)
        elif decision.victim is not None:
            hit = (decision.victim,)
            node = self._nodes[decision.victim]
            if isinstance(fault, Kill):
                self._kill(node)
            elif isinstance(fault, Preempt):
                self._preempt(node, fault.notice_s)
            elif isinstance(fault, Freeze):
                self._freeze(node, fault.duration_s)
        self._faults.append(FaultRecord(fault=str(fault), nodes=hit, step=self._board.step, time=time.time()))
        if self._view is not None:
            gone = "all nodes" if isinstance(fault, TableTrouble) else "its target has already exited"
            self._view.note(f"fault {fault}: {', '.join(hit) or gone}")

    def _disturb(self, fault: TableTrouble) -> None:
        proxy = self._table.proxy
        assert proxy is not None, "a schedule with table faults has a proxy"
        disturbance = proxy.add(fault.disturbance)
        if fault.duration_s is not None:
            self._timers.append(_Timer(time.monotonic() + fault.duration_s, lambda: proxy.remove(disturbance)))

    def _kill(self, node: _Node) -> None:
        node.done_to_it = "killed"
        self._losses.append((node.name, time.time()))
        node.process.kill()

    def _preempt(self, node: _Node, notice_s: float) -> None:
        node.done_to_it = "preempted"
        self._board.set_state(node.name, "preempted")
        node.process.terminate()

        def end() -> None:
            if node.exit_code is None:
                self._losses.append((node.name, time.time()))
                node.process.kill()

        self._timers.append(_Timer(time.monotonic() + notice_s, end))

    def _freeze(self, node: _Node, duration_s: float | None) -> None:
        node.frozen = True
        node.frozen_for_good = duration_s is None
        loss = (node.name, time.time())
        self._losses.append(loss)
        self._board.set_state(node.name, "frozen")
        node.process.freeze()
        if duration_s is None:
            return

        def thaw() -> None:
            node.frozen = False
            if node.name in self._board.members:
                self._losses.remove(loss)  # too short to be detected as a loss
            self._board.set_state(node.name, "thawed")
            node.process.thaw()

        self._timers.append(_Timer(time.monotonic() + duration_s, thaw))


def _state_after(done_to_it: NodeEnding | None, code: int) -> str:
    if done_to_it is not None:
        return done_to_it
    return "finished" if code == 0 else f"exited with {code}"
