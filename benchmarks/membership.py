"""Nodes that die and nodes that come: how long until all that are there train together again.

Two nodes start, a third one comes, one that is not rank 0's is killed, another one comes, rank 0's is killed. A node is
killed with everything that it has started, as a machine that loses its power; the clock runs from the first SIGKILL, or
from the start of the new node's process, until every node has noted a step at the new world size.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from systems import MINIMUM, SYSTEMS, Nodes

from azureml_elastic.local.azurite import Azurite
from azureml_elastic.local.processes import NodeProcess, NodeProcesses

__all__ = ["EVENTS", "Event", "measure_membership"]

Event = Literal["start", "join", "lose_follower", "lose_leader"]

EVENTS: dict[Event, str] = {
    "lose_follower": "a node is killed → next step of the others",
    "lose_leader": "rank 0's node is killed → next step of the others",
    "join": "a third node is started → first step with it",
    "start": "the minimum of two nodes is started → first step",
}

_SEQUENCE: tuple[Event, ...] = ("join", "lose_follower", "join", "lose_leader")
_STEADY_STEPS = 20
_POLL_SECONDS = 0.05


class Step(NamedTuple):
    """One line of the training script's notes."""

    time: float
    world: int
    rank: int


class Cluster:
    """The nodes of one system.

    Args:
        nodes: says how one is started.
        processes: the context in which they are started.
        steps: folder in which they note their steps.
    """

    def __init__(self, nodes: Nodes, processes: NodeProcesses, steps: Path) -> None:
        self._nodes = nodes
        self._processes = processes
        self._steps = steps
        self._names = (f"node-{number}" for number in itertools.count())
        self._alive: dict[str, NodeProcess] = {}

    def add(self) -> float:
        """Start a node and return when."""
        name = next(self._names)
        environment = self._nodes.environment(name, self._steps)
        now = time.time()
        self._alive[name] = self._processes.start(name, self._nodes.argv, environment)
        return now

    def kill(self, *, leader: bool) -> float:
        """Kill the whole process tree of rank 0's node, or of the node with the highest rank, and return when."""
        ranks = {name: self._read(name)[-1].rank for name in self._alive}
        name = (min if leader else max)(ranks, key=lambda node: ranks[node])
        node = self._alive.pop(name)
        tree = node.tree()
        now = time.time()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill()  # what may have been started meanwhile
        return now

    def wait_for_step(self, after: float, limit_s: float) -> float | None:
        """Wait until all living nodes have noted a step together.

        Returns:
            Seconds from ``after`` until the last of them did, ``None`` when they did not within the limit.
        """
        world = len(self._alive)
        while time.time() < after + limit_s:
            first = [
                next((step.time for step in self._read(name) if step.time > after and step.world == world), None)
                for name in self._alive
            ]
            if None not in first:
                return max(moment for moment in first if moment is not None) - after
            time.sleep(_POLL_SECONDS)
        return None

    def wait_until_steady(self, limit_s: float) -> bool:
        """Wait until all living nodes have taken some steps in a row; return whether they did."""
        until = time.time() + limit_s
        while time.time() < until:
            last = [self._read(name)[-_STEADY_STEPS:] for name in self._alive]
            if all(
                len(steps) == _STEADY_STEPS
                and {step.world for step in steps} == {len(self._alive)}
                and time.time() - steps[-1].time < 1
                for steps in last
            ):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _read(self, node: str) -> list[Step]:
        """Return a node's steps in the order in which they were taken."""
        steps = []
        for path in self._steps.glob(f"{node}.*"):
            text = path.read_text("ascii")
            for line in text[: text.rfind("\n") + 1].splitlines():
                moment, world, rank, _ = line.split()
                steps.append(Step(float(moment), int(world), int(rank)))
        return sorted(steps)


def measure_membership(system: str, limit_s: float) -> Iterator[tuple[Event, float | None]]:
    """Take one system through all events; yield each with its seconds, ``None`` when the limit was exceeded.

    After an event that did not succeed in time, the next one happens to new nodes.

    Args:
        system: its name.
        limit_s: for each event.
    """
    waiting = list(_SEQUENCE)
    first = True
    with Azurite() as azurite:
        while waiting:
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
                (folder / "steps").mkdir()
                processes = stack.enter_context(NodeProcesses(folder / "logs"))
                nodes = stack.enter_context(SYSTEMS[system](folder, azurite))
                cluster = Cluster(nodes, processes, folder / "steps")
                begun = cluster.add()
                for _ in range(1, MINIMUM):
                    cluster.add()
                started = cluster.wait_for_step(begun, limit_s)
                if first:
                    yield "start", started
                    first = False
                if waiting[0] != "join":
                    cluster.add()
                yield from _take_through(cluster, waiting, limit_s)


def _take_through(cluster: Cluster, waiting: list[Event], limit_s: float) -> Iterator[tuple[Event, float | None]]:
    """Let the waiting events happen to a cluster, in order, up to the first that exceeds the limit."""
    while waiting:
        event = waiting.pop(0)
        seconds = None
        if cluster.wait_until_steady(limit_s):
            happened = cluster.add() if event == "join" else cluster.kill(leader=event == "lose_leader")
            seconds = cluster.wait_for_step(happened, limit_s)
        yield event, seconds
        if seconds is None:
            return
