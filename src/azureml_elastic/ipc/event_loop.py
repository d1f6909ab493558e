"""The daemon thread that serves the connections of a server or a client, and how a server lets clients in."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.ipc.authentication import Authenticator
from azureml_elastic.ipc.connection import CLOSED_BY_PEER, Connection

_LOG = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Time in which a client must authenticate itself."""

_PAUSE_SECONDS = 0.1
_LOG_SECONDS = 10.0
_HINTS = {
    errno.EMFILE: "this process may open {limit} files (ulimit -n)",
    errno.ENFILE: "the machine may open no more files (sysctl fs.file-max)",
}

_MAX_TOTAL = 1024
_MAX_PER_ADDRESS = 512
"""Many nodes may share an address: behind a gateway, or on one machine."""


class _SparseLog:
    """Says how often something has happened: at once, then at most every ten seconds."""

    def __init__(self) -> None:
        self._number = 0
        self._next = 0.0

    def count(self) -> int:
        """Count one time more, and return the number of times that are to be logged now, 0 for none yet."""
        self._number += 1
        now = time.monotonic()
        if now < self._next:
            return 0
        number, self._number, self._next = self._number, 0, now + _LOG_SECONDS
        return number


class Acceptor:
    """The listening socket of a server's thread.

    A connection that cannot be accepted keeps the listening socket readable. After a failure the socket is therefore
    not watched until the pause is over or a connection of the server has ended; the thread serves its connections
    meanwhile.

    Args:
        listener: listening socket, owned by this object from now on.
        selector: selector of the thread.
        server: name of the server, for messages.

    Attributes:
        resumes: when the pause is over, ``None`` without one.
    """

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, server: str) -> None:
        listener.setblocking(False)
        self.listener = listener
        self._selector = selector
        self._server = server
        self.resumes: float | None = None
        self._failures = _SparseLog()
        selector.register(listener, selectors.EVENT_READ)

    def accept(self) -> socket.socket | None:
        """Return the next connection, ``None`` if there is none or it cannot be accepted now."""
        try:
            return self.listener.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionError):  # a client that has gone meanwhile
            return None
        except OSError as error:
            self._pause(error)
            return None

    def resume(self, *, freed: bool = False) -> None:
        """Watch the listening socket again if the pause is over, or at once if a descriptor has been freed."""
        if self.resumes is not None and (freed or time.monotonic() >= self.resumes):
            self.resumes = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()

    def _pause(self, error: OSError) -> None:
        self.resumes = time.monotonic() + _PAUSE_SECONDS
        self._selector.unregister(self.listener)
        if failures := self._failures.count():
            _LOG.warning(
                "%s could not accept a connection%s: %s; %s. Its connections are served, and new ones are accepted as "
                "soon as files are closed.",
                self._server,
                f", {failures} times since the last such line" if failures > 1 else "",
                error,
                _HINTS.get(error.errno or 0, "see the operating system's limits").format(
                    limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                ),
            )


def limits(files: int) -> tuple[int, int]:
    """Return how many connections may wait for authentication in all, and how many of one address.

    They take at most half of the file descriptors, so that the process can still open others.

    Args:
        files: number of files that the process may open, ``RLIM_INFINITY`` for any number.
    """
    half = _MAX_TOTAL if files == resource.RLIM_INFINITY else max(1, files // 2)
    total = min(_MAX_TOTAL, half)
    return total, min(_MAX_PER_ADDRESS, max(1, total // 2))


@dataclass
class Unauthenticated:
    """The connections of one server whose handshakes are not complete, oldest first. For the loop's thread.

    A server that is flooded closes the oldest connection of the address that has most of them, so that others are still
    served.

    Args:
        server: name of the server, for messages.
    """

    server: str
    limits: tuple[int, int] = field(default_factory=lambda: limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    _since: dict[Connection, float] = field(default_factory=dict)
    _addresses: Counter[str] = field(default_factory=Counter)
    _refusals: _SparseLog = field(default_factory=_SparseLog)

    def add(self, connection: Connection, now: float) -> Connection | None:
        """Add a new connection; return the one to close instead where there are too many."""
        address = _address(connection)
        most, most_of_address = self.limits
        self._since[connection] = now
        self._addresses[address] += 1
        if self._addresses[address] <= most_of_address:
            if len(self._since) <= most:
                return None
            address = self._addresses.most_common(1)[0][0]
        return next(each for each in self._since if _address(each) == address)

    def discard(self, connection: Connection) -> None:
        """Remove a connection that is authenticated or closed."""
        if self._since.pop(connection, None) is not None:
            address = _address(connection)
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    def expired(self, now: float) -> list[Connection]:
        """Return the connections whose time is over."""
        expired = []
        for connection, since in self._since.items():
            if now - since < HANDSHAKE_SECONDS:
                break
            expired.append(connection)
        return expired

    def next_deadline(self) -> float | None:
        """Return when the oldest connection's time is over, ``None`` without connections."""
        return next((since + HANDSHAKE_SECONDS for since in self._since.values()), None)

    def log_refusal(self, connection: Connection) -> None:
        """Log that a connection has ended before its peer was authenticated, unless it was only a probe of the port."""
        if connection.reason == CLOSED_BY_PEER:
            return
        if refusals := self._refusals.count():
            others = f", and {refusals - 1} others since the last such line" if refusals > 1 else ""
            _LOG.warning(
                "%s refused a connection from %s%s: %s.", self.server, connection.peer, others, connection.reason
            )


def _address(connection: Connection) -> str:
    return connection.peer.rpartition(":")[0]


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
        authenticator: Authenticator | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._on_tick = on_tick
        self._tick = tick
        self._authenticator = authenticator
        self._unauthenticated = Unauthenticated(name)
        self._connections: set[Connection] = set()
        self._attention: deque[Connection] = deque()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._acceptor = None if listener is None else Acceptor(listener, self._selector, name)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _LOOPS.add(self)

    def wake(self) -> None:
        """Have the thread look at its connections."""
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: there is nothing to wake
                self._waker.send(b"\0")

    def attend(self, connection: Connection) -> None:
        """Have the thread look at this connection, which has ended, or whose unsent bytes have changed."""
        self._attention.append(connection)  # atomic, and therefore without the lock
        self.wake()

    def abandon(self) -> None:
        """Close this process's copies of all sockets, in a fork, which has no such thread."""
        # Closed, not unregistered: the fork shares the parent's epoll, and would take them from that, too.
        if self._acceptor is not None:
            self._acceptor.close()
        for sock in (self._waker, self._woken, *(each.socket for each in self._connections)):
            sock.close()

    def add(self, connection: Connection) -> None:
        """Serve the connection. For the thread, or before it starts."""
        with self._lock:
            self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._attention.append(connection)  # a client's handshake has something to send already
        if connection.established:
            return
        surplus = self._unauthenticated.add(connection, time.monotonic())
        if surplus is not None:
            surplus.close("too many clients have not authenticated themselves")

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
        """Return the open connections whose peers are authenticated, or need not be."""
        with self._lock:
            return [connection for connection in self._connections if connection.established]

    def on_thread(self) -> bool:
        """Whether the caller is a callback."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        next_tick = time.monotonic() + self._tick
        try:
            while not self._stopping.is_set():
                # Only here are connections removed, so that all events of one select() are of sockets that are there.
                self._settle()
                times = [self._unauthenticated.next_deadline()]
                times += [next_tick] if self._on_tick is not None else []
                times += [self._acceptor.resumes] if self._acceptor is not None else []
                until = min((each for each in times if each is not None), default=None)
                wait = None if until is None else max(0.0, until - time.monotonic())
                for key, events in self._selector.select(wait):
                    self._serve(key, events)
                for connection in self._unauthenticated.expired(time.monotonic()):
                    connection.close("the peer did not authenticate itself in time")
                if self._acceptor is not None:
                    self._acceptor.resume()
                if self._on_tick is not None and time.monotonic() >= next_tick:
                    # From now, not from when it was due: the ticks of a pause of this process are not made up for.
                    next_tick = time.monotonic() + self._tick
                    try:
                        self._on_tick()
                    except Exception:  # noqa: BLE001 - a callback's fault must not end the thread
                        _LOG.exception("The tick of %s failed; the next one will run.", self._thread.name)
        finally:
            for connection in list(self._connections):
                connection.close()
            self._settle()
            self._selector.close()
            if self._acceptor is not None:
                self._acceptor.close()
            for sock in (self._waker, self._woken):
                sock.close()

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._woken:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                self._woken.recv(4096)
        elif self._acceptor is not None and key.fileobj is self._acceptor.listener:
            self._accept(self._acceptor)
        else:
            connection: Connection = key.data
            if events & selectors.EVENT_WRITE:
                connection.write_unsent()
            if events & selectors.EVENT_READ and not connection.closed:
                try:
                    for message in connection.read():
                        self._on_message(connection, message)
                    if connection.established:
                        self._unauthenticated.discard(connection)
                except Exception as error:  # noqa: BLE001 - as above
                    _LOG.exception("A message from %s could not be handled; it is cut off.", connection.peer)
                    connection.close(f"handling a message failed: {error!r}")

    def _accept(self, acceptor: Acceptor) -> None:
        sock = acceptor.accept()
        if sock is None:
            return
        try:
            handshake = self._authenticator.accept() if self._authenticator is not None else None
            connection = Connection(sock, self, handshake)
        except OSError:  # reset before it was accepted
            sock.close()
            return
        self.add(connection)

    def _settle(self) -> None:
        """Remove the closed connections, and watch those with unsent bytes for writing."""
        while self._attention:
            connection = self._attention.popleft()
            if connection not in self._connections:
                continue  # removed before
            if connection.closed:
                self._remove(connection)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write() else 0)
            if self._selector.get_key(connection.socket).events != wanted:
                self._selector.modify(connection.socket, wanted, connection)

    def _remove(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        self._unauthenticated.discard(connection)
        # Before it is closed: another thread may get its number at once, and this selector would watch that.
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if self._acceptor is not None:
            self._acceptor.resume(freed=True)
        if self._acceptor is not None and not connection.established:
            self._unauthenticated.log_refusal(connection)
            if self._authenticator is not None and connection.is_proof_refused:
                self._authenticator.refusals += 1
        elif self._on_close is not None:
            try:
                self._on_close(connection)
            except Exception:  # noqa: BLE001 - as above
                _LOG.exception("Handling the end of the connection to %s failed.", connection.peer)


_LOOPS: weakref.WeakSet[Loop] = weakref.WeakSet()


def _abandon_all() -> None:
    """Let go of the parent's connections: a child that held them would hide the parent's death from the peers."""
    for loop in list(_LOOPS):
        loop.abandon()


os.register_at_fork(after_in_child=_abandon_all)
