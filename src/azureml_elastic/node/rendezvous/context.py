"""What all parts of one node's rendezvous share: settings, objects, and time, threads and connections of the process.

**What the rendezvous uses of its environment: time, threads and connections.** All waiting and all reading of clocks
goes through one :class:`Runtime`, so that the same code also runs in simulated time, with a thousand nodes in one
process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import Authenticator, Connection, MessageClient, MessageServer, Peer
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.node.core.pauses import SilenceLimit
from azureml_elastic.node.core.round import Limits, NewestRound, Round
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.host.addresses import Ports
from azureml_elastic.node.host.identity import new_incarnation


@dataclass(frozen=True)
class LocalNode:
    """Name and place of this node.

    Args:
        name: name of this node, unique in the run.
        host: address under which the other nodes reach this one.
        slots: number of workers of this node.
        host_id: identifier of the machine, against which strikes are counted.
        ports: first and last port to listen on; ``None`` for any.
        probes_other_ports: whether the others test a port outside of ``ports``, because workers listen on such ports.
        program: digest of the program of this node's job; nodes of another one are refused. ``None`` if it is unknown.
    """

    name: str
    host: str
    slots: int = 1
    host_id: str = ""
    incarnation: str = field(default_factory=new_incarnation)
    ports: tuple[int, int] | None = None
    probes_other_ports: bool = True
    program: str | None = None


class Surroundings:
    """What a rendezvous asks of the rest of its node; these answers are those of a node without an agent."""

    def must_leave(self) -> bool:
        """Return whether this node leaves, so that a wait ends with ``NodeLeaving``. From then on it does."""
        return False

    def live_strikes(self, *, fresh: bool) -> int:  # noqa: ARG002 - for those who count
        """Return the number of live strikes against the machine.

        Args:
            fresh: whether other nodes may have written new ones.
        """
        return 0

    def record(self, kind: type[Any], number: int, **fields: Any) -> None:
        """Record an event of a round in the ledger. Thread-safe."""

    def receive_shard(self, connection: Connection, shard: ShardDescription) -> None:  # noqa: ARG002 - as above
        """Take over a connection to the hub whose client offers a snapshot shard. Called from the hub's thread."""
        connection.close("this node holds no shards")

    def progress(self) -> Mapping[str, Any]:
        """Return the fields by which the heartbeat's row shows how far training is. Called from its thread."""
        return {}


class Runtime:
    """The clock, threads and sockets of this machine.

    Args:
        ports: ports on which to listen; any by default.
    """

    serve = MessageServer
    """What serves the connections of a listening socket."""

    dial = MessageClient
    """What connects to such a server."""

    def __init__(self, ports: Ports | None = None) -> None:
        self._ports = ports or Ports()

    def clock(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def event(self) -> threading.Event:
        """Return a new event that is not set."""
        return threading.Event()

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread that is not started."""
        return threading.Thread(target=target, name=name, daemon=True)

    def listen(self, interface: str, backlog: int) -> socket.socket:
        """Return a socket that listens on a free port of the allowed ones.

        Raises:
            UsageError: all allowed ports are taken.
            OSError: the interface is not of this machine.
        """
        return self._ports.listen(interface, backlog)

    def probe(self, addresses: Sequence[tuple[str, int]], timeout: float) -> list[OSError | None]:
        """Try to connect to all addresses at once; return the error of each, ``None`` where it succeeded.

        Args:
            timeout: seconds for all together, from when their names are resolved.
        """
        results: list[OSError | None] = [TimeoutError(errno.ETIMEDOUT, "timed out")] * len(addresses)
        # One thread for all: the probes of a round of thirty nodes would otherwise be thirty threads on each of them.
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            for index, (host, port) in enumerate(addresses):
                try:
                    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                    sock = stack.enter_context(socket.socket(family, kind, protocol))
                    sock.setblocking(False)
                    code = sock.connect_ex(where)
                except OSError as error:
                    results[index] = error
                    continue
                if code in (0, errno.EINPROGRESS):
                    selector.register(sock, selectors.EVENT_WRITE, index)
                else:
                    results[index] = OSError(code, os.strerror(code))
            until = time.monotonic() + timeout
            over = False
            while selector.get_map() and not over:
                left = until - time.monotonic()
                over = left <= 0  # a connection that was made by now counts, however late this thread runs
                for key, _ in selector.select(left):
                    sock = key.fileobj  # type: ignore[assignment] # it was registered as a socket
                    selector.unregister(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    results[key.data] = OSError(code, os.strerror(code)) if code else None
        return results


class SharedNewestRound(NewestRound):
    """A :class:`NewestRound` that is thread-safe.

    The table client, the hub and the connections to other hubs write to it, so that a change of the round is known
    whichever of them brings it first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def observe(self, round_: Round) -> None:
        """See :class:`NewestRound`."""
        with self._lock:
            super().observe(round_)

    def accept(self, round_: Round) -> bool:
        """See :class:`NewestRound`."""
        with self._lock:
            return super().accept(round_)


class Context:
    """Settings and shared objects of one node's rendezvous.

    Args:
        queue: queue for the agent's thread; ``None`` for a new one.

    Attributes:
        authenticator: this node's part in the handshakes with other nodes; gets the run's key once it is read.
        clock: clock in monotonic seconds.
        queue: all that other threads have for the agent's: what hubs have sent, messages of agents, looks at the row.
        latest: newest version of the round that this node has read, written or received.
        silence: limit of the silence of the nodes of a round, and the time between two heartbeats of a connection.
    """

    def __init__(
        self,
        limits: Limits,
        timings: RendezvousTimings,
        runtime: Runtime,
        me: Peer,
        surroundings: Surroundings | None = None,
        queue: EventQueue | None = None,
    ) -> None:
        self.limits = limits
        self.timings = timings
        self.runtime = runtime
        self.surroundings = surroundings or Surroundings()
        self.authenticator = Authenticator(me, "hub")
        self.clock = runtime.clock
        self.queue = queue or EventQueue(runtime.event())
        self.latest = SharedNewestRound()
        self.silence = SilenceLimit(timings)
