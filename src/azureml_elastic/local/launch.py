"""One run of a local cluster, from the first node's start to the last one's end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from azureml_elastic.config import Plan
from azureml_elastic.environment import names as environment
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.free_space import is_full
from azureml_elastic.ledger.events import Progress, Restored, TrainsWithoutSession, WorkerFailed, WorkersStarted
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import EventReader, LineReader
from azureml_elastic.ledger.summary import (
    FaultRecord,
    MissedFault,
    NodeEnding,
    NodeSummary,
    Paths,
    Report,
    RunState,
    audit_folder,
)
from azureml_elastic.local.azurite import TableChoice
from azureml_elastic.local.faults.model import Add, Freeze, Kill, Preempt, Schedule, TableTrouble
from azureml_elastic.local.faults.schedule import ChaosState, Due, due, may_add, reason_missed, training_seconds
from azureml_elastic.local.processes import NodeProcess, NodeProcesses
from azureml_elastic.local.run_end import TIMED_OUT, NodeStatus, RunEnd, StopSignals, outcome_of, phase
from azureml_elastic.local.view import View
from azureml_elastic.node.hangs.stack_dump import collect, render, stack_folders, waiting_lines
from azureml_elastic.private_folder import make_private


@dataclass
class LaunchedNode:
    """A started node and the faults injected into it."""

    process: NodeProcess
    output: LineReader
    forced: NodeEnding | None = None
    """Ending that the launcher has caused."""
    exit_code: int | None = None
    leftovers: int = 0
    last_line: str = ""
    frozen: bool = False
    resumes: bool = True
    began: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    ended: float | None = None

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.process.name

    @property
    def status(self) -> NodeStatus:
        """State for the decision whether the run is over."""
        ending: NodeEnding = "running" if self.resumes else "frozen"
        if self.exit_code is not None:
            ending = self.forced or "exited"
        return NodeStatus(self.name, ending, self.exit_code, self.process.log, self.last_line)

    @property
    def summary(self) -> NodeSummary:
        """State for the report."""
        status = self.status
        return NodeSummary(
            name=self.name,
            exit_code=self.exit_code,
            ending=status.ending,
            leftovers=self.leftovers,
            began=self.began,
            ended=self.ended,
        )


def node_environment(name: str, plan: Plan, table: TableChoice, paths: Paths) -> dict[str, str]:
    """Return the environment of a node: this process's own, with the node's plan, name and folders."""
    return {
        **UserEnvironment.read().for_nodes(),
        **table.environment,
        environment.PLAN: plan.to_json(),
        environment.NODE_ID: name,
        environment.RUN_DIR: str(paths.run_dir),
        environment.LOCAL_ADDRESS: "127.0.0.1",
    }


_POLL_S = 0.03
_IDLE_POLL_S = 0.1
"""The same where no fault waits for its step: each look takes a millisecond from the cores that the nodes train on."""
_LOOK_S = 1.0
"""Pause between two looks at the free space of the run folder."""
_ENDING_S = 1.0
"""Time in which the processes of an agent that was killed end by themselves: those of a preload server may be in the
middle of an import."""


@dataclass(order=True)
class _Timer:
    """An action at a later time: the second half of a fault."""

    at: float
    action: Callable[[], None] = field(compare=False)


@dataclass(kw_only=True)
class Launch:
    """Start the nodes, watch them and inject the faults.

    Args:
        opens_session: whether the program uses this library, so that it reports its steps.
        continued: folders of the runs that this run continues, the first one first.
    """

    plan: Plan
    table: TableChoice
    paths: Paths
    command: Sequence[str]
    processes: NodeProcesses
    schedule: Schedule
    view: View
    signals: StopSignals
    opens_session: bool
    continued: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        self._nodes: dict[str, LaunchedNode] = {}
        self._picture = Picture()
        self._reader = EventReader(self.paths.events)
        self._timers: list[_Timer] = []
        self._fired: frozenset[int] = frozenset()
        self._without_session: float | None = None
        self._first_step: float | None = None
        self._faults: list[FaultRecord] = []
        self._missed: dict[int, str] = {}
        self._losses: list[tuple[str, float]] = []
        self._refusal_shown = False
        self._full = False
        self._look_at = 0.0

    def watch(self, count: int, timeout: float | None, exit_grace: float) -> RunEnd:
        """Start the nodes and return when the run is over; some nodes may still be running then.

        Args:
            timeout: time limit of the run in seconds; ``None`` for no limit.
            exit_grace: seconds that the other nodes have to exit after the run has ended, and all after a signal.
        """
        started = time.monotonic()
        ending_since: float | None = None

        def is_late() -> bool:
            return timeout is not None and time.monotonic() - started > timeout

        for index in range(count):
            self._picture.expect(f"node-{index}")
        self.view.events(self._picture.now, ())
        # The imports of the fork server take seconds. They count to the time limit, and a signal ends the wait for
        # them.
        self.processes.starting.prepare(lambda: is_late() or self.signals.first is not None)
        interrupted = self.signals.first
        if interrupted is not None:
            return self._leave(interrupted, exit_grace)
        if is_late():
            return self._time_out(timeout)
        self._start(count)
        while True:
            self._update()
            self._note_full_disk()
            state = self._chaos_state()
            statuses = [node.status for node in self._nodes.values()]
            current = phase(statuses, self._picture.ended, more_to_come=may_add(self.schedule, state))
            now = time.monotonic()
            if current == "ending" and ending_since is None:
                ending_since = now
            # A node whose agent hangs must not keep the run from its end.
            hurried = self.signals.hurried or (ending_since is not None and now - ending_since > exit_grace)
            if current == "over" or (current == "ending" and hurried):
                return outcome_of(statuses, self._picture.ended, self._picture.last(WorkerFailed))
            if current == "going" and self.signals.first is not None:
                return self._leave(self.signals.first, exit_grace)
            if current == "going":
                for decision in due(self.schedule, state):
                    self._inject(decision)
            # Also while the run ends: a preempted node has to go at its time, and a frozen one ends only when it is
            # resumed.
            for timer in sorted(timer for timer in self._timers if timer.at <= now):
                self._timers.remove(timer)
                timer.action()
            if is_late():
                return self._time_out(timeout)
            time.sleep(_POLL_S if self.schedule.faults or current != "going" else _IDLE_POLL_S)

    def _note_full_disk(self) -> None:
        """Say once, where it is seen, that the nodes have no space left to say anything."""
        now = time.monotonic()
        if self._full or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        self._full = is_full(self.paths.run_dir)
        if self._full:
            self.view.note(
                f"the disk of the run folder {self.paths.run_dir} is full: output, events, checkpoints and a table in "
                "it cannot be written. The nodes wait for space where they need it"
            )

    def _time_out(self, timeout: float | None) -> RunEnd:
        places = [line for node in self._nodes.values() if node.exit_code is None for line in self._ask_where(node)]
        message = f"The run was stopped after {timeout:g} s, the limit that --timeout set, at step {self._step}."
        if places:
            message = f"{message} Its workers then: {'; '.join(places)}."
        return RunEnd("failed", TIMED_OUT, f"{message} The nodes' logs: {self.paths.logs}")

    def _ask_where(self, node: LaunchedNode) -> list[str]:
        """Write the stacks of a node's workers down, and return where each worker is."""
        found = [stacks for folder in stack_folders(node.process.tree()) for stacks in collect(folder, {})]
        if found:
            folder = self.paths.run_dir / "stacks"
            text = render(f"{node.process.name}: the run is stopped at its time limit", found, {})
            with contextlib.suppress(OSError):  # a full disk: the lines below say where the workers are
                make_private(folder)
                (folder / f"timeout.{node.process.name}.txt").write_text(text, encoding="utf-8")
        return waiting_lines(found)

    def _leave(self, first: signal.Signals, grace: float) -> RunEnd:
        """Let all nodes save and leave like preempted ones, until their time is up or another signal hurries them."""
        self.view.note(f"{first.name}: all nodes save and leave within {grace:g} s; another signal kills them")
        deadline = time.monotonic() + grace
        self._timers.clear()
        for node in self._nodes.values():
            if node.frozen:
                self._stop(node)
            elif node.exit_code is None and node.forced is None:
                node.forced = "stopped"
                node.process.terminate()
        while any(node.exit_code is None for node in self._nodes.values()):
            if self.signals.hurried or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            self._update()
        return RunEnd("interrupted", 128 + first, f"{first.name} stopped the run at step {self._step}.")

    def stop_all(self) -> None:
        """Kill the remaining processes, and read the last events and output."""
        # All stop before one ends: the others would take that for the loss of a node, and hold it against its host.
        for node in self._nodes.values():
            if node.exit_code is None:
                node.process.freeze()
        for node in self._nodes.values():
            self._stop(node)
        self._update()

    def _stop(self, node: LaunchedNode) -> None:
        if node.exit_code is None:
            node.forced = node.forced or ("stopped" if node.resumes else "frozen")
            node.process.kill()

    def report(self, outcome: RunState, exit_code: int, message: str) -> Report:
        """Return the run's report."""
        report = Report(
            name=self.paths.run_dir.name,
            run_id=self.plan.name or "",
            paths=self.paths,
            outcome=outcome,
            exit_code=exit_code,
            message=message,
            resumed_from=self.continued[-1] if self.continued else None,
            nodes=tuple(node.summary for node in self._nodes.values()),
            faults=tuple(self._faults),
            missed_faults=self._missed_faults(),
            audit=audit_folder(self.paths, self._picture, self.continued) if self.plan.audit else None,
            skipped_events=self._reader.skipped,
        )
        return report.with_timeline(self._picture, self._losses)

    def _start(self, count: int) -> tuple[str, ...]:
        names = tuple(f"node-{len(self._nodes) + index}" for index in range(count))
        starting = self.processes.starting
        with starting.gathering():
            for name in names:
                variables = node_environment(name, self.plan, self.table, self.paths)
                process = self.processes.start(name, self.command, variables)
                self._nodes[name] = LaunchedNode(process, LineReader(process.log))
                self._picture.expect(name)
        if starting.refusal is not None and not self._refusal_shown:
            self._refusal_shown = True
            self.view.note(f"nodes are not forked, their command is started: {starting.refusal}")
        return names

    def _update(self) -> None:
        """Read new events, output and exit codes."""
        for node in self._nodes.values():
            # Before events and output are read: those of a node that has ended are then complete.
            code = node.process.exit_code()
            if code is not None and node.exit_code is None:
                node.exit_code, node.ended = code, time.time()
                # As with a lost machine, no process of the node stays.
                left = node.process.kill(_ENDING_S)
                # Of a node that was killed at once all processes are left; nothing else could have ended them.
                node.leftovers = 0 if node.forced == "killed" else left
                exited = "finished" if code == 0 else f"exited with {code}"
                self._picture.observe(node.name, node.forced or exited, alive=False)
        fresh = sorted(self._reader.read(), key=lambda event: event.time)  # one machine, one clock
        self._picture.apply(fresh)
        # A program that does not name this library has no session to wait for.
        begun = self._picture.has(TrainsWithoutSession if self.opens_session else WorkersStarted)
        if self._without_session is None and begun:
            self._without_session = time.monotonic()
        if self._first_step is None and self._picture.has(Restored, Progress):
            self._first_step = time.monotonic()
        for node in self._nodes.values():
            lines = [line.decode("utf-8", "replace") for line in node.output.read(last=node.exit_code is not None)]
            node.last_line = next((line for line in reversed(lines) if line.strip()), node.last_line)
            if lines:
                self.view.output(node.name, lines)
        self.view.events(self._picture.now, fresh)

    @property
    def _step(self) -> int:
        return self._picture.now.step or 0

    def _chaos_state(self) -> ChaosState:
        nodes = self._nodes.values()
        return ChaosState(
            step=self._step,
            seconds=training_seconds(time.monotonic(), self._first_step, self._without_session),
            living=frozenset(
                node.name for node in nodes if node.exit_code is None and node.forced is None and not node.frozen
            ),
            gone=frozenset(node.name for node in nodes if node.exit_code is not None),
            rank0=self._picture.now.rank0,
            members=len(self._picture.now.members),
            fired=self._fired,
        )

    def _missed_faults(self) -> tuple[MissedFault, ...]:
        state = self._chaos_state()
        endings = {node.name: node.status.ending for node in self._nodes.values()}
        missed = self._missed | {
            index: reason_missed(fault, state, endings)
            for index, fault in enumerate(self.schedule.faults)
            if index not in self._fired
        }
        return tuple(
            MissedFault(fault=str(self.schedule.faults[index]), reason=missed[index]) for index in sorted(missed)
        )

    def _inject(self, decision: Due) -> None:
        """Carry out a fault, unless its target has already ended."""
        self._fired |= {decision.index}
        fault = decision.fault
        if not isinstance(fault, (Add, TableTrouble)) and decision.victim is None:
            self._missed[decision.index] = f"{fault.target} had already ended"
            self.view.note(f"fault {fault} has no effect: {self._missed[decision.index]}")
            return
        hit: tuple[str, ...] = ()
        if isinstance(fault, Add):
            hit = self._start(fault.count)
        elif isinstance(fault, TableTrouble):
            self._inject_into_table(fault)
        elif decision.victim is not None:
            hit = (decision.victim,)
            node = self._nodes[decision.victim]
            if isinstance(fault, Kill):
                self._kill(node)
            elif isinstance(fault, Preempt):
                self._preempt(node, fault.notice_s)
            elif isinstance(fault, Freeze):
                self._freeze(node, fault.duration_s)
        self._faults.append(FaultRecord(fault=str(fault), nodes=hit, step=self._step, time=time.time()))
        self.view.note(f"fault {fault}: {', '.join(hit) or 'all nodes'}")

    def _inject_into_table(self, fault: TableTrouble) -> None:
        proxy = self.table.proxy
        assert proxy is not None, "a schedule with table faults has a proxy"
        disturbance = proxy.add(fault.disturbance)
        if fault.duration_s is not None:
            self._timers.append(_Timer(time.monotonic() + fault.duration_s, lambda: proxy.remove(disturbance)))

    def _kill(self, node: LaunchedNode) -> None:
        node.forced = "killed"
        # Before the kill, which waits for the end of all processes: the others notice the loss meanwhile, and the
        # recovery is measured from here.
        self._losses.append((node.name, time.time()))
        node.process.kill()

    def _preempt(self, node: LaunchedNode, notice_s: float) -> None:
        node.forced = "preempted"
        self._picture.observe(node.name, "preempted")
        node.process.terminate()

        def end() -> None:
            if node.exit_code is None:
                self._losses.append((node.name, time.time()))
                node.process.kill()

        self._timers.append(_Timer(time.monotonic() + notice_s, end))

    def _freeze(self, node: LaunchedNode, duration_s: float | None) -> None:
        node.frozen, node.resumes = True, duration_s is not None
        loss = (node.name, time.time())
        self._losses.append(loss)
        self._picture.observe(node.name, "frozen")
        node.process.freeze()
        if duration_s is None:
            return

        def thaw() -> None:
            node.frozen = False
            if node.name in self._picture.now.members:
                self._losses.remove(loss)  # too short to be detected as a loss
            self._picture.observe(node.name, "thawed")
            node.process.thaw()

        self._timers.append(_Timer(time.monotonic() + duration_s, thaw))
