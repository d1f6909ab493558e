"""What the rendezvous uses of the machine that it runs on: time, threads and connections.

Everything in which the rendezvous waits, or notices that time has passed, goes through one :class:`Runtime`, so that
the same code also runs on a simulated machine, a thousand of which fit into one process and one second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from azureml_elastic.ipc import LineClient, LineServer
from azureml_elastic.ipc.event_loop import OnClose, OnMessage, OnTick
from azureml_elastic.node.host.ports import Ports

__all__ = ["Runtime"]


class Runtime:
    """This machine.

    Args:
        ports: on which it may listen; any by default.
    """

    def __init__(self, ports: Ports | None = None) -> None:
        self._ports = ports or Ports()

    def clock(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def event(self) -> threading.Event:
        """Return a new event, not set."""
        return threading.Event()

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread, not started."""
        return threading.Thread(target=target, name=name, daemon=True)

    def listen(self, interface: str, backlog: int) -> socket.socket:
        """Return a socket that listens on a free port.

        Raises:
            UsageError: all ports on which this machine may listen are taken.
            OSError: the interface is not ours.
        """
        return self._ports.listen(interface, backlog)

    def listen_as_workers_do(self, interface: str) -> socket.socket:
        """Return a socket that listens on any free port, whatever ports this machine is told to take.

        Raises:
            OSError: no port is free, or the interface is not ours.
        """
        return Ports().listen(interface, 2048)

    def serve(
        self, listener: socket.socket, on_message: OnMessage, on_close: OnClose, on_tick: OnTick, tick: float
    ) -> LineServer:
        """Serve the listener's connections; see :class:`~azureml_elastic.ipc.LineServer`."""
        return LineServer(listener, on_message, on_close, on_tick, tick=tick)

    def dial(
        self,
        address: tuple[str, int],
        on_message: OnMessage,
        on_close: OnClose,
        on_tick: OnTick,
        tick: float,
        timeout: float,
    ) -> LineClient:
        """Connect to a server; see :class:`~azureml_elastic.ipc.LineClient`.

        Raises:
            OSError: nobody listens there, or not within ``timeout`` seconds.
        """
        return LineClient(address, on_message, on_close, on_tick, tick=tick, timeout=timeout)

    def probe(self, addresses: Sequence[tuple[str, int]], timeout: float) -> list[OSError | None]:
        """Connect to all of these at once, hang up, and return for each what was in the way, ``None`` for nothing.

        Args:
            addresses: hosts and ports.
            timeout: seconds for all together, from when their names are known; a connection that has not come about by
                then has timed out.
        """
        results: list[OSError | None] = [TimeoutError(errno.ETIMEDOUT, "timed out")] * len(addresses)
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
                over = left <= 0  # what has come about by now counts, however late it is looked at
                for key, _ in selector.select(left):
                    sock = key.fileobj  # type: ignore[assignment] # it was registered as a socket
                    selector.unregister(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    results[key.data] = OSError(code, os.strerror(code)) if code else None
        return results
