"""A simulated runtime: connections with latency, and hubs that handle one message after the other."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_elastic.ipc import Authenticator, Peer
from azureml_elastic.ipc.connection import encode
from azureml_elastic.node.rendezvous.context import Runtime
from tests.support.rendezvous.simulated_time import Scheduler, SimulatedEvent, SimulatedThread

if TYPE_CHECKING:
    from simulation import Node


@dataclass(frozen=True)
class Costs:
    """Simulated durations in seconds.

    Args:
        message: latency of a message.
        handling: time in which a hub handles one message; it handles one after the other.
        call: duration of a call of the table.
        calls_per_second: capacity of the table.
    """

    message: float = 0.001
    handling: float = 0.00005
    call: float = 0.010
    calls_per_second: float = 2000.0


class End:
    """One end of a connection; replaces ``Connection``."""

    def __init__(
        self, scheduler: Scheduler, node: Node, handlers: tuple[Callable, Callable], costs: Costs, identity: Peer
    ) -> None:
        self._scheduler = scheduler
        self._node = node
        self._on_message, self._on_close = handlers
        self._costs = costs
        self.other: End
        self.server: SimulatedServer | None = None
        self.state: dict[str, Any] = {}
        self.last_received = scheduler.now + node.clock_offset
        self.reason = ""
        self.peer = ""
        self.identity = identity
        self.refused = False

    @property
    def closed(self) -> bool:
        return bool(self.reason)

    def send(self, message: Mapping[str, Any]) -> bool:
        if self.reason or self._node.dead:
            return False
        self.deliver(encode(message))
        return True

    def wait_established(self, timeout: float) -> bool:
        return True

    def deliver(self, line: bytes) -> None:
        """Send an encoded line."""
        if not self._node.cut and not self.other._node.cut:
            self._scheduler.at(self._scheduler.now + self._costs.message, functools.partial(self.other.arrive, line))

    def arrive(self, line: bytes) -> None:
        """Handle a message: at once, or on a server after the messages before it."""
        if self.server is None:
            self.take(line)
        else:
            self._scheduler.at(self.server.busy(self._costs.handling), functools.partial(self.take, line))

    def take(self, line: bytes) -> None:
        if self.reason or self._node.dead:
            return
        self.last_received = self._scheduler.now + self._node.clock_offset
        try:
            self._on_message(self, _decode(line))
        except Exception as error:
            self._node.cluster.failures.append("".join(traceback.format_exception(error)))
            self.close(f"handling a message failed: {error!r}")

    def close(self, reason: str = "closed by this side") -> None:
        self.end(reason, quietly=False)

    def end(self, reason: str, *, quietly: bool) -> None:
        """End both ends: this one now, without ``on_close`` if ``quietly``, the other one after the latency."""
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
        """End the connection after the messages that were sent before."""
        end = functools.partial(self.end, "the peer closed the connection", quietly=False)
        if self.server is None:
            end()
        else:
            self._scheduler.at(self.server.busy(0.0), end)


@functools.lru_cache(maxsize=64)  # a broadcast is one text to very many
def _decode(line: bytes) -> dict[str, Any]:
    return json.loads(line)


class SimulatedServer:
    """Replaces ``MessageServer``."""

    def __init__(
        self,
        node: Node,
        port: int,
        on_message: Callable,
        on_close: Callable,
        on_tick: Callable,
        tick: float,
        authenticator: Authenticator,
    ):
        self.node = node
        self.authenticator = authenticator
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
    """Replaces ``MessageClient``."""

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
    """Replaces a listening socket, of which only the port is used, until a server has it."""

    def __init__(self, port: int, node: Node) -> None:
        self._port = port
        self._node = node
        node.listening.add(port)

    def getsockname(self) -> tuple[str, int]:
        return "", self._port

    def close(self) -> None:
        self._node.listening.discard(self._port)


class SimulatedRuntime(Runtime):
    """The runtime of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._cluster = node.cluster
        self._scheduler = node.cluster.scheduler

    def clock(self) -> float:
        return self._scheduler.now + self._node.clock_offset

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self._scheduler)

    def thread(self, target: Callable[[], None], name: str) -> SimulatedThread:
        return SimulatedThread(self._scheduler, self._node, target, name)

    def listen(self, interface: str, backlog: int) -> SimulatedListener:
        return SimulatedListener(next(self._cluster.ports), self._node)

    def serve(
        self, listener, on_message, on_close=lambda _: None, on_tick=lambda: None, *, tick=1.0, authenticator
    ) -> SimulatedServer:
        port = listener.getsockname()[1]
        listener.close()
        return SimulatedServer(self._node, port, on_message, on_close, on_tick, tick, authenticator)

    def dial(
        self, address, on_message, on_close, on_tick=lambda: None, *, tick=1.0, timeout, authenticator, to
    ) -> SimulatedClient:
        scheduler, costs, node = self._scheduler, self._cluster.costs, self._node
        node.step()
        host, port = address
        target = self._cluster.by_host[host]
        if self._cluster.blocks(node, target):
            scheduler.wait(scheduler.now + timeout)
            raise TimeoutError(f"{host} does not answer")
        scheduler.wait(scheduler.now + 2 * costs.message)
        server = None if target.dead else target.servers.get(port)
        if server is None:
            raise ConnectionRefusedError(f"nothing listens at {host}:{port}")
        near = End(scheduler, node, (on_message, on_close), costs, server.authenticator.me)
        far = End(scheduler, target, server.handlers, costs, authenticator.me)
        near.other, far.other, far.server = far, near, server
        if server.authenticator.key is None or server.authenticator.key != authenticator.key:
            near.refused = server.authenticator.key is not None
            server.authenticator.refusals += near.refused
            far.reason = "the handshake failed"
            scheduler.at(scheduler.now + 2 * costs.message, near.hang_up)
        else:
            server.connections[far] = None
        node.ends.append(near)
        return SimulatedClient(node, near, on_tick, tick)

    def probe(self, addresses, timeout) -> list[OSError | None]:
        scheduler, node = self._scheduler, self._node
        node.step()
        targets = [(self._cluster.by_host[host], port) for host, port in addresses]
        silent = [self._cluster.blocks(node, target) for target, _ in targets]
        scheduler.wait(scheduler.now + (timeout if any(silent) else 2 * self._cluster.costs.message))
        return [
            TimeoutError("timed out") if blocked
            else None if not target.dead and (port in target.servers or port in target.listening)
            else ConnectionRefusedError("nothing listens there")
            for blocked, (target, port) in zip(silent, targets, strict=True)
        ]  # fmt: skip
