"""The daemon thread that serves the connections of a server or a client."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from azureml_elastic.ipc.connection import Connection

__all__ = ["Loop", "OnClose", "OnMessage", "OnTick"]

_LOG = logging.getLogger(__name__)
_ACCEPT_PAUSE_SECONDS = 0.05

OnMessage = Callable[[Connection, dict[str, Any]], None]
OnClose = Callable[[Connection], None]
OnTick = Callable[[], None]


class Loop:
    """The daemon thread behind a server or a client; the arguments are theirs."""

    def __init__(
        self,
        on_message: OnMessage,
        on_close: OnClose | None,
        on_tick: OnTick | None,
        *,
        tick: float,
        listener: socket.socket | None,
        name: str,
    ) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._on_tick = on_tick
        self._tick = tick
        self._listener = listener
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _LOOPS.add(self)

    def wake(self) -> None:
        """Have the thread look at its connections."""
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: there is nothing to wake
                self._waker.send(b"\0")

    def abandon(self) -> None:
        """Close this process's copies of all sockets, in a fork, which has no such thread."""
        for sock in (self._listener, self._waker, self._woken, *(each.socket for each in self._connections)):
            if sock is not None:
                sock.close()

    def add(self, connection: Connection) -> None:
        """Serve the connection. For the thread, or before it starts."""
        with self._lock:
            self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all connections, then the thread; returns when both have ended, but at once on the thread."""
        self._stopping.set()
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def connections(self) -> list[Connection]:
        """Return those that have not been buried."""
        with self._lock:
            return list(self._connections)

    def on_thread(self) -> bool:
        """Whether the caller is a callback."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        next_tick = time.monotonic() + self._tick
        try:
            while not self._stopping.is_set():
                wait = None if self._on_tick is None else max(0.0, next_tick - time.monotonic())
                self._settle()
                for key, events in self._selector.select(wait):
                    self._serve(key, events)
                if self._on_tick is not None and time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + self._tick
                    try:
                        self._on_tick()
                    except Exception:  # noqa: BLE001 - a callback's fault must not end the thread
                        _LOG.exception("The tick of %s failed; the next one will run.", self._thread.name)
        finally:
            for connection in self.connections():
                connection.close()
            self._settle()
            self._selector.close()
            for sock in (self._listener, self._waker, self._woken):
                if sock is not None:
                    sock.close()

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._woken:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                self._woken.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            connection: Connection = key.data
            if events & selectors.EVENT_WRITE:
                connection.write_unsent()
            if events & selectors.EVENT_READ and not connection.closed:
                try:
                    for message in connection.read():
                        self._on_message(connection, message)
                except Exception as error:  # noqa: BLE001 - as above
                    _LOG.exception("A message from %s could not be handled; it is cut off.", connection.peer)
                    connection.close(f"handling a message failed: {error!r}")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            _LOG.warning("Accepting a connection failed (%s); tried again shortly.", error)
            self._stopping.wait(_ACCEPT_PAUSE_SECONDS)
            return
        try:
            self.add(Connection(sock, self))
        except OSError:  # reset before it was accepted
            sock.close()

    def _settle(self) -> None:
        """Bring the selector in line with the connections, and bury the closed ones."""
        for connection in self.connections():
            if connection.closed:
                with self._lock:
                    self._connections.discard(connection)
                self._selector.unregister(connection.socket)
                connection.socket.close()
                if self._on_close is not None:
                    try:
                        self._on_close(connection)
                    except Exception:  # noqa: BLE001 - as above
                        _LOG.exception("Handling the end of the connection to %s failed.", connection.peer)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write() else 0)
            if self._selector.get_key(connection.socket).events != wanted:
                self._selector.modify(connection.socket, wanted, connection)


_LOOPS: weakref.WeakSet[Loop] = weakref.WeakSet()


def _abandon_all() -> None:
    """Let go of the parent's connections: a child that held them would hide the parent's death from the peers."""
    for loop in list(_LOOPS):
        loop.abandon()


os.register_at_fork(after_in_child=_abandon_all)
