"""How a server lets clients in: its listening socket, which rests while no file is free, and limits on strangers."""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass, field

from azureml_elastic.ipc.connection import CLOSED_BY_PEER, Connection

__all__ = ["HANDSHAKE_SECONDS", "Acceptor", "Unauthenticated", "limits"]

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
    """

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, server: str) -> None:
        listener.setblocking(False)
        self.listener = listener
        self._selector = selector
        self._server = server
        self._resumes: float | None = None
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

    def deadline(self) -> float | None:
        """Return when the pause is over, ``None`` without one."""
        return self._resumes

    def resume(self, *, freed: bool = False) -> None:
        """Watch the listening socket again if the pause is over, or at once if a descriptor has been freed."""
        if self._resumes is not None and (freed or time.monotonic() >= self._resumes):
            self._resumes = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()

    def _pause(self, error: OSError) -> None:
        self._resumes = time.monotonic() + _PAUSE_SECONDS
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
