"""The ports on which a node listens for the other nodes: any that are free, or those of a range, for firewalls."""

from __future__ import annotations

import errno
import socket

from azureml_elastic.config.rendezvous import PORTS_OF_A_NODE
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc import listen

__all__ = ["Ports"]


class Ports:
    """Allocator of listening sockets. Not thread-safe.

    Within a range each socket gets the port after the one before, so that a client with an earlier round's port
    finds no listener there. Several nodes of one machine can share a range.

    Args:
        allowed: the first and the last port; ``None`` takes any that is free.
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
            f"All {count} ports of port_range={low}-{high} were tried on {interface}, and all are taken. A node needs "
            f"{PORTS_OF_A_NODE}, and so does each further node on the same machine. Free some, or give a larger "
            "port_range."
        )
