"""Limits of the connections that a server has accepted and whose peers are not authenticated yet. No I/O."""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from dataclasses import dataclass, field

from azureml_elastic.ipc.connection import CLOSED_BY_PEER, Connection

__all__ = ["HANDSHAKE_SECONDS", "Refusals", "Unauthenticated", "limits"]

_LOG = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Time in which a client must authenticate itself."""

_LOG_SECONDS = 10.0

_MAX_TOTAL = 1024
_MAX_PER_ADDRESS = 512
"""Many nodes may share an address: behind a gateway, or on one machine."""


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
    """

    limits: tuple[int, int] = field(default_factory=lambda: limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    _since: dict[Connection, float] = field(default_factory=dict)
    _addresses: Counter[str] = field(default_factory=Counter)

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


class Refusals:
    """Log of the clients that were not authenticated: one line, then at most one every ten seconds with their number.

    Args:
        server: name of the server.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._number = 0
        self._next = 0.0

    def log(self, connection: Connection) -> None:
        """Log that a connection has ended before its peer was authenticated, unless it was only a probe of the port."""
        if connection.reason == CLOSED_BY_PEER:
            return
        self._number += 1
        now = time.monotonic()
        if now >= self._next:
            others = f", and {self._number - 1} others since the last such line" if self._number > 1 else ""
            _LOG.warning(
                "%s refused a connection from %s%s: %s.", self._server, connection.peer, others, connection.reason
            )
            self._number, self._next = 0, now + _LOG_SECONDS


def _address(connection: Connection) -> str:
    return connection.peer.rpartition(":")[0]
