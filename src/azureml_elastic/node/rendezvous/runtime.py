"""What the rendezvous uses of its environment: time, threads and connections.

All waiting and all reading of clocks goes through one :class:`Runtime`, so that the same code also runs in simulated
time, with a thousand nodes in one process.
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

from azureml_elastic.ipc import Authenticator, MessageClient, MessageServer, Peer
from azureml_elastic.ipc.event_loop import OnClose, OnMessage, OnTick
from azureml_elastic.node.host.addresses import Ports

__all__ = ["Runtime"]


class Runtime:
    """The clock, threads and sockets of this machine.

    Args:
        ports: ports on which to listen; any by default.
    """

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

    def listen_on_any_port(self, interface: str) -> socket.socket:
        """Return a socket that listens on any free port, as workers do, whatever ports are allowed.

        Raises:
            OSError: no port is free, or the interface is not of this machine.
        """
        return Ports().listen(interface, 2048)

    def serve(
        self,
        listener: socket.socket,
        on_message: OnMessage,
        on_close: OnClose,
        on_tick: OnTick,
        tick: float,
        authenticator: Authenticator,
    ) -> MessageServer:
        """Serve the listener's connections; see :class:`~azureml_elastic.ipc.MessageServer`."""
        return MessageServer(listener, on_message, on_close, on_tick, tick=tick, authenticator=authenticator)

    def dial(
        self,
        address: tuple[str, int],
        on_message: OnMessage,
        on_close: OnClose,
        on_tick: OnTick,
        tick: float,
        timeout: float,
        authenticator: Authenticator,
        to: Peer,
    ) -> MessageClient:
        """Connect to a server; see :class:`~azureml_elastic.ipc.MessageClient`.

        Raises:
            OSError: the connection was refused, or not accepted within ``timeout`` seconds.
        """
        return MessageClient(
            address, on_message, on_close, on_tick, tick=tick, timeout=timeout, authenticator=authenticator, to=to
        )

    def probe(self, addresses: Sequence[tuple[str, int]], timeout: float) -> list[OSError | None]:
        """Try to connect to all addresses at once; return the error of each, ``None`` where it succeeded.

        Args:
            addresses: hosts and ports.
            timeout: seconds for all together, from when their names are resolved.
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
                over = left <= 0  # a connection that was made by now counts, however late this thread runs
                for key, _ in selector.select(left):
                    sock = key.fileobj  # type: ignore[assignment] # it was registered as a socket
                    selector.unregister(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    results[key.data] = OSError(code, os.strerror(code)) if code else None
        return results
