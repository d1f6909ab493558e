"""Failures and arrivals of nodes and workers: the time until the remaining nodes train again.

Two nodes start, once one after the other and once together; a third one joins; its worker is killed; a node other than
rank 0's is killed and replaced; one is frozen and replaced; rank 0's is killed. A node is killed or frozen with all of
its processes. The clock runs from the signal, or from the start of the new node's process, until every unaffected node
has taken a step in a new process group.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from systems import MINIMUM, SYSTEMS, Nodes

from azureml_elastic.local.azurite import Azurite
from azureml_elastic.local.processes import NodeProcess, NodeProcesses

__all__ = ["EVENTS", "Event", "Observation", "measure_membership"]

Event = Literal["start", "complete", "join", "gap", "kill_worker", "lose_follower", "freeze", "lose_leader"]

EVENTS: dict[Event, str] = {
    "kill_worker": "a worker is killed → next step",
    "lose_follower": "a node is killed → next step of the others",
    "lose_leader": "rank 0's node is killed → next step of the others",
    "freeze": "a node is frozen → next step of the others",
    "join": "a third node is started → first step with it",
    "gap": "a third node joins: training is paused",
    "complete": "one node waits, the last of the minimum is started → first step",
    "start": "both nodes of the minimum are started at once → first step",
}

_SEQUENCE: tuple[Event, ...] = ("join", "kill_worker", "lose_follower", "join", "freeze", "join", "lose_leader")
_STEADY_STEPS = 20
_BEFORE_FREEZING_SECONDS = 5.0
"""Time for which the nodes train before one is frozen: for the first three seconds of a connection, its heartbeats are
not known yet, and silence has to be as long as that."""
_POLL_SECONDS = 0.02
_WAITING_SECONDS = 12.0
"""Time for which a node waits for the last node of the minimum, so that its own preparations are done."""


class Step(NamedTuple):
    """One step recorded by the training script."""

    time: float
    pid: int
    generation: int
    world: int
    rank: int
    step: int

    @property
    def group(self) -> tuple[int, int]:
        """Identifier of the process group of the step."""
        return self.pid, self.generation


class Observation(NamedTuple):
    """Measurement of an event.

    Args:
        event: kind of event.
        seconds: time as described in the module's docstring, ``None`` when the limit was exceeded.
        lost_steps: number of completed steps that were trained again, if the script counts them.
    """

    event: Event
    seconds: float | None
    lost_steps: int | None = None


class Cluster:
    """The nodes of one system.

    Args:
        nodes: command and environment of a node.
        processes: context in which the nodes are started.
        steps: folder in which the training scripts record their steps.
        variables: additional environment variables of each node.
    """

    def __init__(
        self, nodes: Nodes, processes: NodeProcesses, steps: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._variables = dict(variables or {})
        self._nodes = nodes
        self._processes = processes
        self._steps = steps
        self._names = (f"node-{number}" for number in itertools.count())
        self._alive: dict[str, NodeProcess] = {}
        self._groups: dict[str, tuple[int, int]] = {}

    def add(self) -> float:
        """Start a node and return when."""
        self._remember()
        name = next(self._names)
        environment = {**self._nodes.environment(name, self._steps), **self._variables}
        now = time.time()
        self._alive[name] = self._processes.start(name, self._nodes.argv, environment)
        return now

    def kill(self, *, leader: bool) -> float:
        """Kill the whole process tree of rank 0's node, or of the node with the highest rank, and return when."""
        node = self._take(leader=leader)
        tree = node.tree()
        now = time.time()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill()  # also processes that were started meanwhile
        return now

    def freeze(self) -> float:
        """Stop the whole process tree of the node with the highest rank, and return when; it never comes back."""
        node = self._take(leader=False)
        now = time.time()
        node.freeze()
        return now

    def kill_worker(self) -> float:
        """Kill the worker of the node with the highest rank, and return when; the node is expected back."""
        name = self._ranked()[-1]
        self._remember()
        pid = self.steps_of(name)[-1].pid
        now = time.time()
        psutil.Process(pid).kill()
        del self._groups[name]  # the next step of this node is not waited for
        return now

    def wait_for_step(self, after: float, limit_s: float, *, together: bool) -> float | None:
        """Wait until every node has recorded a step in a new process group.

        Args:
            after: start of the measurement.
            limit_s: limit in seconds.
            together: whether all living nodes must be in that group, or only the unaffected ones.

        Returns:
            Seconds from ``after`` until the last of them did, ``None`` when they did not within the limit.
        """
        names = list(self._alive) if together else list(self._groups)
        while time.time() < after + limit_s:
            found = [self._first_new(name, after, len(self._alive) if together else None) for name in names]
            if all(found):
                return max(step.time for step in found if step is not None) - after
            time.sleep(_POLL_SECONDS)
        return None

    def gap(self, after: float) -> tuple[float, int]:
        """Return the longest pause of the old nodes in seconds, and how many completed steps they repeated."""
        pauses, lost = [], []
        for name, group in self._groups.items():
            steps = self.steps_of(name)
            last = [step for step in steps if step.group == group][-1]
            new = self._first_new(name, after, len(self._alive))
            assert new is not None
            pauses.append(new.time - last.time)
            lost.append(last.step + 1 - new.step)
        return max(pauses), max(lost)

    def wait_until_steady(self, limit_s: float) -> bool:
        """Wait until all living nodes have taken some steps in a row; return whether they did."""
        until = time.time() + limit_s
        while time.time() < until:
            last = [self.steps_of(name)[-_STEADY_STEPS:] for name in self._alive]
            if all(
                len(steps) == _STEADY_STEPS
                and {step.world for step in steps} == {len(self._alive)}
                and time.time() - steps[-1].time < 1
                for steps in last
            ):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _first_new(self, name: str, after: float, world: int | None) -> Step | None:
        old = self._groups.get(name)
        return next(
            (
                step
                for step in self.steps_of(name)
                if step.time > after and step.group != old and world in (None, step.world)
            ),
            None,
        )

    def _remember(self) -> None:
        """Remember the current process group of each node."""
        self._groups = {name: steps[-1].group for name in self._alive if (steps := self.steps_of(name))}

    def _ranked(self) -> list[str]:
        ranks = {name: self.steps_of(name)[-1].rank for name in self._alive}
        return sorted(ranks, key=lambda name: ranks[name])

    def _take(self, *, leader: bool) -> NodeProcess:
        name = self._ranked()[0 if leader else -1]
        node = self._alive.pop(name)
        self._remember()
        return node

    def steps_of(self, node: str) -> list[Step]:
        """Return a node's steps in the order in which they were taken."""
        steps = []
        for path in self._steps.glob(f"{node}.*"):
            text = path.read_text("ascii")
            pid = int(path.suffix[1:])
            for line in text[: text.rfind("\n") + 1].splitlines():
                moment, world, rank, generation, step = line.split()
                steps.append(Step(float(moment), pid, int(generation), int(world), int(rank), int(step)))
        return sorted(steps)


def measure_membership(system: str, limit_s: float) -> Iterator[Observation]:
    """Take one system through all events.

    After an event that did not succeed in time, the next one happens to new nodes.

    Args:
        system: its name.
        limit_s: time limit of each event in seconds.
    """
    waiting = list(_SEQUENCE)
    with Azurite() as azurite:
        with _two_nodes(system, azurite, apart=_WAITING_SECONDS) as (cluster, begun, _):
            yield Observation("complete", cluster.wait_for_step(begun, limit_s, together=True))
        first = True
        while waiting:
            with _two_nodes(system, azurite) as (cluster, begun, nodes):
                started = cluster.wait_for_step(begun, limit_s, together=True)
                if first:
                    yield Observation("start", started)
                    first = False
                if waiting[0] != "join":
                    cluster.add()
                yield from _take_through(cluster, waiting, limit_s, nodes)


@contextlib.contextmanager
def _two_nodes(system: str, azurite: Azurite, apart: float = 0.0) -> Iterator[tuple[Cluster, float, Nodes]]:
    """Start the minimum of nodes; gives them, and when the last one was started or, without a delay, the first one."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        (folder / "steps").mkdir()
        processes = stack.enter_context(NodeProcesses(folder / "logs"))
        nodes = stack.enter_context(SYSTEMS[system](folder, azurite))
        cluster = Cluster(nodes, processes, folder / "steps")
        moments = [cluster.add() for _ in range(1, MINIMUM)]
        time.sleep(apart)
        moments.append(cluster.add())
        yield cluster, moments[-1 if apart else 0], nodes


def _take_through(cluster: Cluster, waiting: list[Event], limit_s: float, nodes: Nodes) -> Iterator[Observation]:
    """Let the waiting events happen to a cluster, in order, up to the first that exceeds the limit."""
    while waiting:
        event = waiting.pop(0)
        seconds = None
        if cluster.wait_until_steady(limit_s):
            if event == "join":
                happened = cluster.add()
            elif event == "freeze":
                time.sleep(_BEFORE_FREEZING_SECONDS)
                happened = cluster.freeze()
            elif event == "kill_worker":
                happened = cluster.kill_worker()
            else:
                happened = cluster.kill(leader=event == "lose_leader")
            seconds = cluster.wait_for_step(happened, limit_s, together=event == "join")
            if event == "join" and seconds is not None:
                pause, lost = cluster.gap(happened)
                yield Observation("gap", pause, lost if nodes.counts_steps else None)
        yield Observation(event, seconds)
        if seconds is None:
            return
