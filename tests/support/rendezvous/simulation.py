"""A cluster of nodes that run the real rendezvous in simulated time.

Every node is a real thread that calls the real :class:`Rendezvous`. Only the machine below it and the table are
simulated: whatever blocks (a call of the table, dialling, a wait) hands over to the scheduler, which lets one thread
run at a time and puts the clock forward when all of them wait. A run is therefore the same each time for a seed, and a
minute of a thousand nodes takes seconds.

Modelled are the latency of messages and of dialling, hubs that handle one message after the other, the latency of the
table, and a queue for calls beyond its capacity, where a query counts once for each page. The processor time of nodes
and the bandwidth of the network are not.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core.events import RoundSeen, TimePassed
from azureml_elastic.node.core.node import Part
from azureml_elastic.node.core.round import Limits, Round
from azureml_elastic.node.rendezvous.context import LocalNode
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY, RUN_KEY, node_of
from tests.support.rendezvous.simulated_runtime import Costs, End, SimulatedRuntime, SimulatedServer
from tests.support.rendezvous.simulated_table import Fault, SimulatedStorage, SimulatedTable, Write
from tests.support.rendezvous.simulated_time import Killed, Scheduler, Task

__all__ = ["Cluster", "Costs", "Fault", "Killed", "Node", "Stalled", "Write"]

_STACK_BYTES = 256 * 1024


class Stalled(AssertionError):
    """A condition did not hold in time."""


class Node:
    """One node: the rendezvous and, above it, what an agent does with it.

    Args:
        cluster: cluster of the node.
        name: name of the node.
        limits: node counts.
        imports_s: seconds between its announcement and its joining.
    """

    def __init__(self, cluster: Cluster, name: str, limits: Limits, imports_s: float) -> None:
        self.cluster = cluster
        self.name = name
        self.host = f"host-of-{name}"
        self.dead = False
        self.cut = False
        self.clock_offset = 0.0
        self.servers: dict[int, SimulatedServer] = {}
        self.listening: set[int] = set()
        self.ends: list[End] = []
        self.steps = 0
        self.dies_at: int | None = None
        self.joined: list[Round] = []
        self.in_round = False
        self._ends: dict[str, object] | None = None
        self._limits = limits
        self._imports_s = imports_s
        self.rendezvous: Rendezvous

    def start(self) -> None:
        scheduler = self.cluster.scheduler
        scheduler.start(Task(scheduler, self), self._live, self.name)

    def ended(self) -> None:
        """Take note that one of the node's threads has ended."""
        self.cluster.check()

    def step(self) -> None:
        """Come to a point at which a node may be killed: before and after whatever blocks."""
        if self.dead:
            raise Killed
        self.steps += 1
        if self.steps == self.dies_at:
            self.kill()
            raise Killed

    def kill(self) -> None:
        """End the node as SIGKILL would: connections break without a message."""
        self.dead = True
        self.in_round = False
        for server in list(self.servers.values()):
            for end in list(server.connections):
                end.close()
        for end in self.ends:
            end.close()
        self.cluster.check()

    def unplug(self) -> None:
        """Cut the node off: other nodes receive nothing from it, not even the end of connections."""
        self.cut = True
        self.in_round = False

    def break_round(self, **how: object) -> None:
        """Have the node end its round when it looks at it next; see ``Rendezvous.reopen``."""
        self._ends = how

    def drop_connections(self) -> None:
        """Break all connections to and from this node; it goes on."""
        for server in list(self.servers.values()):
            for end in list(server.connections):
                end.close("reset")
        for end in self.ends:
            end.close("reset")

    def _live(self) -> None:
        try:
            self._take_part()
        except Killed:
            pass
        except BaseException as error:
            self.cluster.failures.append(f"{self.name}: {''.join(traceback.format_exception(error))}")
            self.dead = True

    def _take_part(self) -> None:
        cluster = self.cluster
        self.rendezvous = Rendezvous(
            SimulatedTable(cluster.storage, self), LocalNode(self.name, self.host), self._limits, cluster.timings,
            runtime=SimulatedRuntime(self),
        )  # fmt: skip
        if self._imports_s >= 0:
            self.rendezvous.announce()
            cluster.scheduler.wait(cluster.scheduler.now + self._imports_s)
        while True:
            assignment = self.rendezvous.join()
            self.in_round = True
            self.joined.append(assignment.round)
            cluster.check()
            self._stay()
            self.in_round = False

    def _stay(self) -> None:
        """Be in a round until it is over, as an agent is."""
        rendezvous = self.rendezvous
        while True:
            rendezvous.queue.wait(self.cluster.monitor_s)
            status = rendezvous.status()
            if status.broken:
                self._end(status)
                return
            if self._ends is not None:
                how, self._ends = self._ends, None
                rendezvous.round_end.write(do.Reopen("requested by the test", **how))
                return
            if rendezvous.machine.leads and status.waiting:
                rendezvous.round_end.write(do.Reopen("joining"))
                return

    def _end(self, seen: RoundSeen) -> None:
        """End a broken round, or leave that to another node, as a member decides."""
        rendezvous, clock = self.rendezvous, self.cluster.scheduler
        machine = rendezvous.machine
        actions = machine.end_round(do.Reopen("broken", seen.lost), clock.now)
        while True:
            for action in actions:
                rendezvous.perform(action)
            if machine.part is Part.MEMBER:
                return
            rendezvous.queue.wait(min(self.cluster.monitor_s, machine.deadline - clock.now))
            rendezvous.status()
            actions = machine.handle(TimePassed(), clock.now)


@dataclass
class Cluster:
    """Nodes, their machines and their table.

    Args:
        seed: start of the random number generator.
        timings: timings of the rendezvous.
        costs: simulated durations.
        fault: function that returns the failure of a call of the table, or ``None``.
        monitor_s: seconds between two status checks of an agent.
    """

    seed: int = 0
    timings: RendezvousTimings = field(default_factory=RendezvousTimings)
    costs: Costs = field(default_factory=Costs)
    fault: Callable[[random.Random, float, str, Node], Fault | None] = lambda *_: None
    monitor_s: float = 0.25

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.scheduler = Scheduler()
        self.storage = SimulatedStorage(self)
        self.ports = itertools.count(20000)
        self.nodes: list[Node] = []
        self.by_host: dict[str, Node] = {}
        self.failures: list[str] = []
        self.blocked: set[tuple[str, str]] = set()
        self._wanted: Callable[[], bool] = lambda: False
        self._in_the_way: Node | None = None

    def add(self, name: str, limits: Limits, arrives_at: float = 0.0, imports_s: float = 0.0) -> Node:
        """Add a node that arrives at a moment; negative ``imports_s`` for one that does not announce itself."""
        node = Node(self, name, limits, imports_s)
        self.nodes.append(node)
        self.by_host[node.host] = node
        self.scheduler.at(arrives_at, node.start)
        return node

    def block(self, one: str, other: str, *, both: bool = True) -> None:
        """Have the network drop whatever one node sends to another to connect to it."""
        self.blocked |= {(one, other), *([(other, one)] if both else [])}

    def blocks(self, one: Node, other: Node) -> bool:
        """Return whether one node gets no answer when it connects to another."""
        return one.cut or other.cut or (one.name, other.name) in self.blocked

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen to the cluster."""
        self.scheduler.at(when, what)

    def check(self) -> None:
        """Check the condition that is waited for."""
        if self._wanted():
            self.scheduler.resume(self.scheduler.main, self.scheduler.now, self.scheduler.main.token)

    def run(self, until: Callable[[], bool], limit_s: float) -> float:
        """Advance time until a condition holds, and return the moment.

        Raises:
            Stalled: it does not hold after this many simulated seconds.
        """
        self._wanted = until
        if until():
            return self.scheduler.now
        before = threading.stack_size(_STACK_BYTES)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1.0)  # only one thread has anything to do at a time
        try:
            self.scheduler.wait(self.scheduler.now + limit_s)
        finally:
            threading.stack_size(before)
            sys.setswitchinterval(interval)
        if not until():
            outside = [node.name for node in self.nodes if not node.dead and not node.in_round]
            raise Stalled(
                f"not after {limit_s:g} s; without an assignment: {outside[:10]} ({len(outside)}); {self.failures}"
            )
        return self.scheduler.now

    def pass_time(self, seconds: float) -> None:
        """Run for so many seconds."""
        until = self.scheduler.now + seconds
        self.at(until, self.check)
        self.run(lambda: self.scheduler.now >= until, seconds + 1.0)

    def settle(self, limit_s: float, size: int | None = None) -> float:
        """Run until all living nodes are in one sealed round, and return the moment."""

        def settled() -> bool:
            if any(not (node.in_round or node.dead or node.cut) for node in self._outside_first()):
                return False
            alive = [node for node in self.nodes if not node.dead and not node.cut]
            if len(alive) < (size or 1):
                return False
            numbers = {node.joined[-1].number for node in alive}
            return len(numbers) == 1 and {member.node for member in alive[0].joined[-1].members} == {
                node.name for node in alive
            }

        return self.run(settled, limit_s)

    def _outside_first(self) -> Iterator[Node]:
        """Yield all nodes, first the one at which the previous call stopped."""
        if self._in_the_way is not None:
            yield self._in_the_way
        for node in self.nodes:
            self._in_the_way = node
            yield node

    def close(self) -> None:
        """End all threads."""
        for node in self.nodes:
            node.dead = True
        self.run(lambda: self.scheduler.threads == 0, 3600.0)

    # --- invariants ----------------------------------------------------------------------------------------------

    def rounds(self) -> list[Round]:
        """Return all versions of the round's row, as they were written."""
        return [Round.from_value(write.value) for write in self.storage.writes if write.key == ROUND_KEY and write.done]

    def verify(self) -> None:
        """Check the invariants.

        Raises:
            AssertionError: one does not hold.
        """
        assert not self.failures, self.failures[0]
        sealed: set[int] = set()
        before = Round()
        for round_ in self.rounds():
            names = [member.node for member in round_.members]
            assert len(names) == len(set(names)), f"round {round_.number} has a member twice: {names}"
            if round_.state == "sealed":
                assert round_.number not in sealed, f"round {round_.number} was sealed twice"
                assert round_.number == before.number, "a round was sealed that was not open"
                assert before.state == "open", "a round was sealed that was not open"
                sealed.add(round_.number)
            else:
                assert round_.number == before.number + 1, f"{before.number} was followed by {round_.number}"
                assert before.state == "sealed", "an open round was reopened"
            before = round_
        seen: set[tuple[str, str]] = set()
        for write in self.storage.writes:
            if write.done and node_of(write.key) is not None:
                what = {name: value for name, value in write.value.items() if name != "written_by"}
                same = (write.key, json.dumps(what, sort_keys=True))
                assert same not in seen, f"{write.node} wrote the same twice: {what}"
                seen.add(same)
        for node in self.nodes:
            numbers = [round_.number for round_ in node.joined]
            assert numbers == sorted(set(numbers)), f"{node.name} was in {numbers}"

    def most_writes(self) -> int:
        """Return the largest number of attempts of a node to write its own row."""
        tried = Counter(write.key for write in self.storage.writes if node_of(write.key) is not None)
        return max(tried.values())

    @property
    def conflicts(self) -> list[Write]:
        """Writes that failed because the row had changed, except attempts to make the run's key."""
        return [write for write in self.storage.writes if not write.done and write.key != RUN_KEY]
