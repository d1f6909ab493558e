"""The ports on which a node listens: any free ones, or those of a range."""

from __future__ import annotations

import errno
import socket

from azureml_elastic.config.rendezvous import PORTS_OF_A_NODE
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc import listen

__all__ = ["Ports"]


class Ports:
    """Allocator of listening sockets. Not thread-safe.

    Ports of a range are used in turn, so that a client with the port of an earlier round finds no listener there.
    Several nodes of one machine can share a range.

    Args:
        allowed: first and last port of the range; ``None`` for any free port.
    """

    def __init__(self, allowed: tuple[int, int] | None = None) -> None:
        self.allowed = allowed
        self._next = allowed[0] if allowed is not None else 0

    def listen(self, interface: str, backlog: int) -> socket.socket:
        """Return a socket that listens on a free port.

        Args:
            interface: address to listen on.
            backlog: maximum number of connections waiting to be accepted.

        Raises:
            UsageError: all ports of the range are taken.
            OSError: the interface is not an address of this machine.
        """
        if self.allowed is None:
            return listen((interface, 0), backlog=backlog)
        low, high = self.allowed
        count = high - low + 1
        for step in range(count):
            port = low + (self._next - low + step) % count
            try:
                listener = listen((interface, port), backlog=backlog)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                self._next = port + 1
                return listener
        raise UsageError(
            f"All {count} ports of port_range={low}-{high} are taken on {interface}. Each node on a machine needs "
            f"{PORTS_OF_A_NODE}. Free some, or give a larger port_range."
        )
