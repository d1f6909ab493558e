"""A cluster of nodes in simulated time, which run the rendezvous as it is.

Every node is a real thread that calls the real :class:`Rendezvous`. Only the machine below it and the table are
simulated: whatever blocks (a call of the table, dialling, a wait) hands over to the scheduler, which lets one thread
run at a time and puts the clock forward when all of them wait. A run is therefore the same each time for a seed, and a
minute of a thousand nodes takes seconds.

What is modelled: the latency of a message and of dialling; that a hub handles one message after the other; the latency
of the table, and a queue in front of it where it is asked for more than its capacity, a query counting once for each
page. What takes the processor's time in a node, and the bandwidth of the network, is not.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from azureml_elastic.errors import RowChanged, RowExists, TableUnavailable
from azureml_elastic.node.rendezvous.handler import Rendezvous
from azureml_elastic.node.rendezvous.keys import node_of
from azureml_elastic.node.rendezvous.machine import Machine
from azureml_elastic.node.rendezvous.round import ROUND_KEY, Limits, Round
from azureml_elastic.node.table import Row
from azureml_elastic.node.table.values import read_value, write_value
from azureml_elastic.spec import RendezvousTimings
from azureml_elastic.wire.messages import encode

__all__ = ["Cluster", "Costs", "Fault", "Killed", "Node", "Stalled"]

_PAGE = 1000
_CUT_OFF_SECONDS = 10.0  # as long as a table is asked again and again before it counts as away
_STACK_BYTES = 256 * 1024
_START = datetime(2020, 1, 1, tzinfo=timezone.utc)


class Killed(BaseException):
    """Ends the thread of a node that was killed: nothing that catches errors catches it."""


class Stalled(AssertionError):
    """What was waited for did not come about in time."""


@dataclass(frozen=True)
class Costs:
    """What things take, in seconds.

    Args:
        message: from one machine to another.
        handling: of one message by a hub, which handles one after the other.
        call: of the table, from the call to its answer.
        calls_per_second: that the table serves.
    """

    message: float = 0.001
    handling: float = 0.00005
    call: float = 0.010
    calls_per_second: float = 2000.0


class Task:
    """One thread that runs only when the scheduler lets it."""

    def __init__(self, scheduler: Scheduler, node: Node | None) -> None:
        self.scheduler = scheduler
        self.node = node
        self.turn = threading.Lock()
        self.turn.acquire()
        self.token = 0  # of the newest wait: an older one's end must not end this one


class Scheduler:
    """Simulated time: what happens when, and whose turn it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.threads = 0
        self._agenda: list[tuple[float, int, Any, int]] = []
        self._numbers = itertools.count()
        self._tasks = threading.local()
        self.main = Task(self, None)
        self._tasks.current = self.main

    @property
    def current(self) -> Task:
        """The task of this thread."""
        return self._tasks.current

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._agenda, (when, next(self._numbers), what, 0))

    def resume(self, task: Task, when: float, token: int) -> None:
        """End the task's wait with this token, if it still lasts."""
        heapq.heappush(self._agenda, (when, next(self._numbers), task, token))

    def wait(self, until: float) -> None:
        """Let others run until this moment, or until somebody resumes this task with its token.

        Raises:
            Killed: its node was killed meanwhile.
        """
        task = self.current
        self.resume(task, until, task.token)
        self._run(task)
        task.token += 1
        if task.node is not None and task.node.dead:
            raise Killed

    def start(self, task: Task, run: Callable[[], None], name: str) -> None:
        """Start a thread, whose first turn is now."""

        def body() -> None:
            self._tasks.current = task
            task.turn.acquire()
            task.token += 1
            try:
                if not task.node.dead:
                    run()
            finally:
                self.threads -= 1
                task.node.cluster.check()
                self._run(None)

        self.threads += 1
        threading.Thread(target=body, name=name, daemon=True).start()
        self.resume(task, self.now, task.token)

    def _run(self, me: Task | None) -> None:
        """Run what is on the agenda until it is this task's turn; a thread that ends has none and just hands over."""
        while True:
            when, _, what, token = heapq.heappop(self._agenda)
            self.now = max(self.now, when)
            self.events += 1
            if not isinstance(what, Task):
                what()
            elif what.token == token:
                if what is me:
                    return
                what.turn.release()
                if me is not None:
                    me.turn.acquire()
                return


class SimulatedEvent:
    """Stands for ``threading.Event``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[tuple[Task, int]] = []

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task, token in waiting:
            self._scheduler.resume(task, self._scheduler.now, token)

    def wait(self, timeout: float | None = None) -> bool:
        task = self._scheduler.current
        if task.node is not None:
            task.node.step()
        if not self._set:
            self._waiting.append((task, task.token))
            self._scheduler.wait(float("inf") if timeout is None else self._scheduler.now + timeout)
            self._waiting = [(other, token) for other, token in self._waiting if other is not task]
        return self._set


class SimulatedThread:
    """Stands for ``threading.Thread``."""

    def __init__(self, scheduler: Scheduler, node: Node, target: Callable[[], None], name: str) -> None:
        self._scheduler = scheduler
        self._node = node
        self._target = target
        self._name = name
        self._ended = SimulatedEvent(scheduler)

    def start(self) -> None:
        def run() -> None:
            try:
                self._target()
            except Killed:
                pass
            finally:
                self._ended.set()

        self._scheduler.start(Task(self._scheduler, self._node), run, self._name)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class End:
    """One end of a connection; stands for the wire's ``Connection``."""

    def __init__(self, scheduler: Scheduler, node: Node, handlers: tuple[Callable, Callable], costs: Costs) -> None:
        self._scheduler = scheduler
        self._node = node
        self._on_message, self._on_close = handlers
        self._costs = costs
        self.other: End
        self.server: SimulatedServer | None = None
        self.state: dict[str, Any] = {}
        self.last_heard = scheduler.now
        self.reason = ""
        self.peer = ""

    @property
    def closed(self) -> bool:
        return bool(self.reason)

    def send(self, message: Mapping[str, Any]) -> bool:
        if self.reason or self._node.dead:
            return False
        self.deliver(encode(message))
        return True

    def deliver(self, line: bytes) -> None:
        """Send an encoded line."""
        if not self._node.cut and not self.other._node.cut:
            self._scheduler.at(self._scheduler.now + self._costs.message, functools.partial(self.other.arrive, line))

    def arrive(self, line: bytes) -> None:
        """Take a message in: at once, or by a server when it has handled those before."""
        if self.server is None:
            self.take(line)
        else:
            self._scheduler.at(self.server.busy(self._costs.handling), functools.partial(self.take, line))

    def take(self, line: bytes) -> None:
        if self.reason or self._node.dead:
            return
        self.last_heard = self._scheduler.now
        try:
            self._on_message(self, _decode(line))
        except Exception as error:
            self._node.cluster.failures.append("".join(traceback.format_exception(error)))
            self.close(f"handling a message failed: {error!r}")

    def close(self, reason: str = "closed by this side") -> None:
        self.end(reason, quietly=False)

    def end(self, reason: str, *, quietly: bool) -> None:
        """End both ends: this one now, without a word to its owner if ``quietly``, the other one a little later."""
        if self.reason:
            return
        self.reason = reason
        if self.server is not None:
            self.server.connections.pop(self, None)
        if not quietly and not self._node.dead:
            self._scheduler.at(self._scheduler.now, lambda: None if self._node.dead else self._on_close(self))
        if not self._node.cut and not self.other._node.cut:
            self._scheduler.at(self._scheduler.now + self._costs.message, self.other.hang_up)

    def hang_up(self) -> None:
        """Take the end of the connection in, behind what was sent before."""
        end = functools.partial(self.end, "the peer closed the connection", quietly=False)
        if self.server is None:
            end()
        else:
            self._scheduler.at(self.server.busy(0.0), end)


@functools.lru_cache(maxsize=64)  # a broadcast is one text to very many
def _decode(line: bytes) -> dict[str, Any]:
    return json.loads(line)


class SimulatedServer:
    """Stands for ``LineServer``."""

    def __init__(self, node: Node, port: int, on_message: Callable, on_close: Callable, on_tick: Callable, tick: float):
        self.node = node
        self.port = port
        self.handlers = (on_message, on_close)
        self.connections: dict[End, None] = {}
        self._scheduler = node.cluster.scheduler
        self._on_tick = on_tick
        self._tick = tick
        self._busy_until = 0.0
        node.servers[port] = self
        self._scheduler.at(self._scheduler.now + tick, self._ticks)

    def busy(self, seconds: float) -> float:
        """Return when a message will be handled that takes so long."""
        self._busy_until = max(self._busy_until, self._scheduler.now) + seconds
        return self._busy_until

    def broadcast(self, message: Mapping[str, Any]) -> None:
        line = encode(message)
        for end in list(self.connections):
            end.deliver(line)

    def close(self) -> None:
        self.node.servers.pop(self.port, None)
        for end in list(self.connections):
            end.close()

    def _ticks(self) -> None:
        if self.node.dead or self.node.servers.get(self.port) is not self:
            return
        if not self.node.cut:
            self._on_tick()
        self._scheduler.at(self._scheduler.now + self._tick, self._ticks)


class SimulatedClient:
    """Stands for ``LineClient``."""

    def __init__(self, node: Node, connection: End, on_tick: Callable, tick: float) -> None:
        self.connection = connection
        self._node = node
        self._on_tick = on_tick
        self._tick = tick
        self._scheduler = node.cluster.scheduler
        self._scheduler.at(self._scheduler.now + tick, self._ticks)

    def send(self, message: Mapping[str, Any]) -> bool:
        return self.connection.send(message)

    def close(self) -> None:
        self.connection.end("closed by this side", quietly=True)

    def _ticks(self) -> None:
        if self._node.dead or self.connection.closed:
            return
        if not self._node.cut:
            self._on_tick()
        self._scheduler.at(self._scheduler.now + self._tick, self._ticks)


class SimulatedListener:
    """Stands for a listening socket, of which only the port is of interest."""

    def __init__(self, port: int) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return "", self._port

    def close(self) -> None:
        pass


class SimulatedMachine(Machine):
    """The machine below one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._cluster = node.cluster
        self._scheduler = node.cluster.scheduler

    def clock(self) -> float:
        return self._scheduler.now

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self._scheduler)

    def thread(self, target: Callable[[], None], name: str) -> SimulatedThread:
        return SimulatedThread(self._scheduler, self._node, target, name)

    def listen(self, interface: str, backlog: int) -> SimulatedListener:
        return SimulatedListener(next(self._cluster.ports))

    def serve(self, listener, on_message, on_close, on_tick, tick) -> SimulatedServer:
        return SimulatedServer(self._node, listener.getsockname()[1], on_message, on_close, on_tick, tick)

    def dial(self, address, on_message, on_close, on_tick, tick, timeout) -> SimulatedClient:
        scheduler, costs, node = self._scheduler, self._cluster.costs, self._node
        node.step()
        host, port = address
        target = self._cluster.by_host[host]
        if node.cut or target.cut:
            scheduler.wait(scheduler.now + timeout)
            raise TimeoutError(f"{host} does not answer")
        scheduler.wait(scheduler.now + 2 * costs.message)
        server = None if target.dead else target.servers.get(port)
        if server is None:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        near = End(scheduler, node, (on_message, on_close), costs)
        far = End(scheduler, target, server.handlers, costs)
        near.other, far.other, far.server = far, near, server
        server.connections[far] = None
        node.ends.append(near)
        return SimulatedClient(node, near, on_tick, tick)


@dataclass(frozen=True)
class Fault:
    """What becomes of one call of the table.

    Args:
        done: whether it is carried out although it fails.
        seconds: until it fails.
    """

    done: bool
    seconds: float


@dataclass(frozen=True)
class Write:
    """One write that was tried."""

    when: float
    node: str
    key: str
    value: Mapping[str, Any]
    done: bool


class SimulatedStorage:
    """What all tables share; a call takes its place in the queue, has its effect, and is answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._costs = cluster.costs
        self._rows: dict[str, Row] = {}
        self._free_at = 0.0
        self._versions = itertools.count(1)
        self.calls: Counter[str] = Counter()
        self.writes: list[Write] = []

    def call(self, node: Node, kind: str, key: str, effect: Callable[[], Any]) -> Any:
        """Carry a call out in simulated time."""
        scheduler, costs = self._scheduler, self._costs
        node.step()
        self.calls[kind] += 1
        pages = 1
        if kind == "query":
            pages = max(1, -(-sum(name.startswith(key) for name in self._rows) // _PAGE))
            self.calls["query"] += pages - 1
        answer: list[Any] = []

        def happen() -> None:
            try:
                answer.append(effect())
            except (RowExists, RowChanged) as error:
                answer.append(error)

        start = max(scheduler.now, self._free_at)
        self._free_at = start + pages / costs.calls_per_second
        end = start + pages * costs.call
        fault = self._cluster.fault(self._cluster.random, scheduler.now, kind, node)
        if node.cut:
            fault = Fault(done=False, seconds=_CUT_OFF_SECONDS)
        if fault is None or fault.done:
            scheduler.at((start + end) / 2, happen)
        if fault is not None:
            scheduler.wait(max(end, scheduler.now + fault.seconds))
            raise TableUnavailable(f"{kind} of {key!r}: {'the answer was lost' if fault.done else 'not carried out'}")
        scheduler.wait(end)
        node.step()
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def get(self, key: str) -> Row | None:
        return self._rows.get(key)

    def query(self, prefix: str) -> list[Row]:
        return [row for key, row in sorted(self._rows.items()) if key.startswith(prefix)]

    def write(self, node: Node, key: str, value: Mapping[str, Any], etag: str | None) -> str:
        stored = read_value(key, write_value(key, value))
        row = self._rows.get(key)
        done = (row.etag if row else None) == etag
        self.writes.append(Write(self._scheduler.now, node.name, key, stored, done))
        if not done:
            raise (RowExists if etag is None else RowChanged)(f"Row {key!r} is not as expected.")
        new = Row(key, stored, str(next(self._versions)), _START + timedelta(seconds=self._scheduler.now))
        self._rows[key] = new
        return new.etag


class SimulatedTable:
    """One node's table; implements ``Table``."""

    def __init__(self, storage: SimulatedStorage, node: Node) -> None:
        self._storage = storage
        self._node = node

    def get(self, key: str) -> Row | None:
        return self._storage.call(self._node, "get", key, lambda: self._storage.get(key))

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        write_value(key, value)
        effect = functools.partial(self._storage.write, self._node, key, value, None)
        return self._storage.call(self._node, "insert", key, effect)

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        write_value(key, value)
        effect = functools.partial(self._storage.write, self._node, key, value, etag)
        return self._storage.call(self._node, "replace", key, effect)

    def delete(self, key: str, etag: str | None = None) -> None:
        raise NotImplementedError("the rendezvous deletes nothing")

    def query(self, prefix: str) -> Iterator[Row]:
        return iter(self._storage.call(self._node, "query", prefix, lambda: self._storage.query(prefix)))

    def close(self) -> None:
        pass


class Node:
    """One node: the rendezvous and, above it, what an agent does with it.

    Args:
        cluster: that it belongs to.
        name: of the node.
        limits: node counts.
        imports_s: between its announcement and its joining.
    """

    def __init__(self, cluster: Cluster, name: str, limits: Limits, imports_s: float) -> None:
        self.cluster = cluster
        self.name = name
        self.host = f"host-of-{name}"
        self.dead = False
        self.cut = False
        self.servers: dict[int, SimulatedServer] = {}
        self.ends: list[End] = []
        self.steps = 0
        self.dies_at: int | None = None
        self.joined: list[Round] = []
        self.seated = False
        self._limits = limits
        self._imports_s = imports_s
        self.rendezvous: Rendezvous

    def start(self) -> None:
        scheduler = self.cluster.scheduler
        scheduler.start(Task(scheduler, self), self._live, self.name)

    def step(self) -> None:
        """Come to a point at which a node may be killed: before and after whatever blocks."""
        if self.dead:
            raise Killed
        self.steps += 1
        if self.steps == self.dies_at:
            self.kill()
            raise Killed

    def kill(self) -> None:
        """End the node as SIGKILL would: connections break, nothing is said."""
        self.dead = True
        self.seated = False
        for server in list(self.servers.values()):
            for end in list(server.connections):
                end.close()
        for end in self.ends:
            end.close()
        self.cluster.check()

    def unplug(self) -> None:
        """Cut the node off: whoever waits for it hears nothing, not even that it is gone."""
        self.cut = True
        self.seated = False

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
            SimulatedTable(cluster.storage, self), self.name, self.host, 1, self._limits, cluster.timings,
            machine=SimulatedMachine(self),
        )  # fmt: skip
        if self._imports_s >= 0:
            self.rendezvous.announce()
            cluster.scheduler.wait(cluster.scheduler.now + self._imports_s)
        while True:
            seat = self.rendezvous.join()
            self.seated = True
            self.joined.append(seat.round)
            cluster.check()
            self._stay()
            self.seated = False

    def _stay(self) -> None:
        """Be in a round until it is over, as an agent is."""
        rendezvous = self.rendezvous
        while True:
            rendezvous.wake.wait(self.cluster.monitor_s)
            rendezvous.wake.clear()
            status = rendezvous.status()
            if status.broken:
                rendezvous.reopen("lost" if status.lost else "reopened", lost=status.lost)
                return
            if rendezvous.leads and status.waiting:
                rendezvous.reopen("joining")
                return


@dataclass
class Cluster:
    """Nodes, their machines and their table.

    Args:
        seed: of everything random.
        timings: of the rendezvous.
        costs: of everything that takes time.
        fault: decides for each call of the table what becomes of it, ``None`` for nothing unusual.
        monitor_s: between two looks of an agent at its round.
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
        self._wanted: Callable[[], bool] = lambda: False
        self._in_the_way: Node | None = None

    def add(self, name: str, limits: Limits, arrives_at: float = 0.0, imports_s: float = 0.0) -> Node:
        """Add a node that arrives at a moment; negative ``imports_s`` for one that does not announce itself."""
        node = Node(self, name, limits, imports_s)
        self.nodes.append(node)
        self.by_host[node.host] = node
        self.scheduler.at(arrives_at, node.start)
        return node

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen to the cluster."""
        self.scheduler.at(when, what)

    def check(self) -> None:
        """Look whether what is waited for has come about."""
        if self._wanted():
            self.scheduler.resume(self.scheduler.main, self.scheduler.now, self.scheduler.main.token)

    def run(self, until: Callable[[], bool], limit_s: float) -> float:
        """Let time pass until something has come about, and return the moment.

        Raises:
            Stalled: it has not after so many simulated seconds.
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
            outside = [node.name for node in self.nodes if not node.dead and not node.seated]
            raise Stalled(f"not after {limit_s:g} s; without a seat: {outside[:10]} ({len(outside)}); {self.failures}")
        return self.scheduler.now

    def settle(self, limit_s: float, size: int | None = None) -> float:
        """Run until all living nodes are in one sealed round, and return the moment."""

        def settled() -> bool:
            if any(not (node.seated or node.dead or node.cut) for node in self._unseated_first()):
                return False
            alive = [node for node in self.nodes if not node.dead and not node.cut]
            if len(alive) < (size or 1):
                return False
            numbers = {node.joined[-1].number for node in alive}
            return len(numbers) == 1 and {member.node for member in alive[0].joined[-1].members} == {
                node.name for node in alive
            }

        return self.run(settled, limit_s)

    def _unseated_first(self) -> Iterator[Node]:
        """Yield all nodes, the one first that stood in the way when this was asked last."""
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

    # --- what must hold ----------------------------------------------------------------------------------------------

    def rounds(self) -> list[Round]:
        """Return all versions of the round's row, as they were written."""
        return [Round.from_value(write.value) for write in self.storage.writes if write.key == ROUND_KEY and write.done]

    def verify(self) -> None:
        """Check what must hold whatever happens.

        Raises:
            AssertionError: it does not.
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
        """Return how often the node that did so most has tried to write its own row."""
        tried = Counter(write.key for write in self.storage.writes if node_of(write.key) is not None)
        return max(tried.values())

    @property
    def conflicts(self) -> list[Write]:
        """Writes in vain."""
        return [write for write in self.storage.writes if not write.done]
