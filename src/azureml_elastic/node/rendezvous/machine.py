"""What the rendezvous uses of the machine that it runs on: time, threads and connections.

Everything in which the rendezvous waits, or notices that time has passed, goes through one :class:`Machine`, so that
the same code also runs on a simulated machine, a thousand of which fit into one process and one second.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from azureml_elastic.wire import LineClient, LineServer, listen
from azureml_elastic.wire.loop import OnClose, OnMessage, OnTick

__all__ = ["Machine"]


class Machine:
    """This machine."""

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
            OSError: no port is free, or the interface is not ours.
        """
        return listen((interface, 0), backlog=backlog)

    def serve(
        self, listener: socket.socket, on_message: OnMessage, on_close: OnClose, on_tick: OnTick, tick: float
    ) -> LineServer:
        """Serve the listener's connections; see :class:`~azureml_elastic.wire.LineServer`."""
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
        """Connect to a server; see :class:`~azureml_elastic.wire.LineClient`.

        Raises:
            OSError: nobody listens there, or not within ``timeout`` seconds.
        """
        return LineClient(address, on_message, on_close, on_tick, tick=tick, timeout=timeout)
