"""The nodes of one system while they start, observed from outside."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from process_trees import Memory, ProcessTree, Trees, memory_of, observed_trees
from startup_systems import NodeCommand, System, node_command

from azureml_elastic.local.azurite import Azurite

__all__ = ["Cluster", "NodeMemory", "Started", "Step", "measure_local", "read_steps", "started_nodes"]

_POLL_SECONDS = 0.01
_IDLE_SECONDS = 2.5
"""The preload server pauses for 2 s after a fork, and then imports what torch imports in its first steps."""

_IDLE_CPU_SECONDS = 0.1


class Step(NamedTuple):
    """One step recorded by a training script."""

    time: float
    pid: int
    world: int
    rank: int
    round: int
    step: int


class Started(NamedTuple):
    """When all nodes took their first step together.

    Args:
        seconds: time until the last of them had, ``None`` if it exceeded the limit.
        cpu: CPU seconds of each node until its own first step, by node number.
    """

    seconds: float | None
    cpu: Mapping[int, float]


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a node's processes.

    Args:
        agent: the process of the node's command; ``None`` where that is the worker.
        preload: the process that forked the worker, if that is not the agent.
        others: all others but the workers.
        workers: the workers.
    """

    agent: Memory | None
    preload: Memory | None
    others: tuple[Memory, ...]
    workers: tuple[Memory, ...]

    @property
    def beside(self) -> float:
        """Private MB of all processes but the workers."""
        return sum(each.uss for each in (self.agent, self.preload, *self.others) if each is not None)

    @property
    def own(self) -> float:
        """Private MB of agent and preload server."""
        return sum(each.uss for each in (self.agent, self.preload) if each is not None)

    @property
    def total(self) -> float:
        """MB of the whole node, each page shared between processes divided among them."""
        return sum(each.pss for each in (self.agent, self.preload, *self.others, *self.workers) if each is not None)


class Cluster:
    """The nodes of one system.

    Args:
        system: the system.
        command: how a node is started.
        trees: where nodes are started.
        folder: folder of the run, in which its steps are recorded.
    """

    def __init__(self, system: System, command: NodeCommand, trees: Trees, folder: Path) -> None:
        self._system = system
        self._command = command
        self._steps = folder / "steps"
        self._steps.mkdir()
        self.trees = trees
        self.nodes: dict[int, ProcessTree] = {}

    def add(self) -> float:
        """Start a node and return when."""
        number = len(self.nodes)
        own = {"BENCH_NODE": f"node-{number}", "BENCH_STEPS": str(self._steps)}
        environment = {**self._system.environment(), **own, **self._command.variables(number)}
        argv = self._command.argv(number)
        now = time.monotonic()
        self.nodes[number] = self.trees.start(f"node-{number}", argv, environment)
        return now

    def wait_for_steps(self, began: float, limit_s: float) -> Started:
        """Wait until all nodes have taken a step together.

        Args:
            began: start of the measurement.
            limit_s: limit in seconds.
        """
        first: dict[int, float] = {}
        cpu: dict[int, float] = {}
        while time.monotonic() < began + limit_s:
            for number, tree in self.nodes.items():
                if number not in first:
                    found = next((each for each in self.steps_of(number) if each.world == len(self.nodes)), None)
                    if found is not None:
                        first[number], cpu[number] = found.time, tree.cpu_seconds()
            if len(first) == len(self.nodes):
                return Started(max(first.values()) - began, cpu)
            time.sleep(_POLL_SECONDS)
        return Started(None, cpu)

    def steps_of(self, number: int) -> list[Step]:
        """Return a node's steps in order."""
        return read_steps(self._steps, f"node-{number}")

    def forget_steps(self) -> None:
        """Remove the records of workers that have ended, so that reading them does not take ever longer."""
        alive = set().union(*(tree.pids() for tree in self.nodes.values()))
        for path in self._steps.iterdir():
            if int(path.suffix[1:]) not in alive:
                path.unlink()

    def settle(self, limit_s: float = 20.0) -> None:
        """Wait until the processes beside the workers have nothing left to prepare: they use (almost) no CPU time."""
        until = time.monotonic() + limit_s
        before = self._cpu_beside_workers()
        while time.monotonic() < until:
            time.sleep(_IDLE_SECONDS)
            now = self._cpu_beside_workers()
            if now - before < _IDLE_CPU_SECONDS * len(self.nodes):
                return
            before = now

    def _cpu_beside_workers(self) -> float:
        total = 0.0
        for number, tree in self.nodes.items():
            for pid in tree.pids() - {step.pid for step in self.steps_of(number)}:
                with contextlib.suppress(psutil.Error):
                    total += sum(psutil.Process(pid).cpu_times()[:2])
        return total

    def memory(self, number: int) -> NodeMemory:
        """Return the memory of a node's processes now."""
        tree = self.nodes[number]
        alive = tree.pids()
        workers = {step.pid for step in self.steps_of(number)} & alive
        agent = {tree.pid} - workers
        parents = {parent for pid in workers if (parent := _parent(pid)) is not None}
        preload = (parents & alive) - agent - workers
        others = alive - agent - preload - workers

        def memories(pids: set[int]) -> tuple[Memory, ...]:
            return tuple(found for pid in sorted(pids) if (found := memory_of(pid)) is not None)

        return NodeMemory(
            agent=next(iter(memories(agent)), None),
            preload=next(iter(memories(preload)), None),
            others=memories(others),
            workers=memories(workers),
        )


def read_steps(folder: Path, node: str = "*") -> list[Step]:
    """Return the steps that the workers of a node, or of all nodes, have recorded, in order."""
    steps = []
    for path in folder.glob(f"{node}.*"):
        text = path.read_text("ascii")
        pid = int(path.suffix[1:])
        for line in text[: text.rfind("\n") + 1].splitlines():
            moment, *numbers = line.split()
            steps.append(Step(float(moment), pid, *map(int, numbers)))
    return sorted(steps)


@contextlib.contextmanager
def started_nodes(
    system: System, nodes: tuple[int, int], count: int, azurite: Azurite
) -> Iterator[tuple[Cluster, float]]:
    """Start nodes at once; yields them, and when the first was started.

    Args:
        system: the system.
        nodes: minimum and maximum number of nodes.
        count: number of nodes to start.
        azurite: emulator of the table.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        trees = stack.enter_context(observed_trees(folder / "logs"))
        command = stack.enter_context(node_command(system, trees, folder, nodes, azurite))
        cluster = Cluster(system, command, trees, folder)
        yield cluster, min(cluster.add() for _ in range(count))


def measure_local(system: System, count: int, limit_s: float) -> Started:
    """Start nodes by ``azureml-elastic local``; the CPU time is that of the launcher and all of its nodes.

    Args:
        system: this library, of any version.
        count: number of nodes, and minimum of the run.
        limit_s: limit in seconds.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        trees = stack.enter_context(observed_trees(folder / "logs"))
        steps = folder / "steps"
        steps.mkdir()
        words = [system.python, "-c", "from azureml_elastic.cli import main; main()", "local", "--plain"]
        words += ["--nodes", f"{count}:{count}", "--run-dir", str(folder / "run"), system.script]
        began = time.monotonic()
        tree = trees.start("local", words, {**system.environment(), "BENCH_STEPS": str(steps)})
        while time.monotonic() < began + limit_s:
            first: dict[int, float] = {}
            for step in read_steps(steps):
                if step.world == count:
                    first.setdefault(step.rank, step.time)
            if len(first) == count:
                return Started(max(first.values()) - began, {0: tree.cpu_seconds()})
            time.sleep(_POLL_SECONDS)
        print(trees.logs(), file=sys.stderr)
        return Started(None, {})


def _parent(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return None
