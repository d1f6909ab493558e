"""The ports on which processes that a test has started listen, and a port that answers nobody."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that answers no connection, as behind a firewall: its queue is full, and the kernel drops the rest."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        callers = [stack.enter_context(socket.socket()) for _ in range(3)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        assert select.select([], callers, [], 10)[1], "one fills the queue, the others never get in"
        yield server.getsockname()[1]


def reachable_addresses() -> set[tuple[str, int]]:
    """Return address and port of all TCP sockets on which children of this process listen, but for 127.0.0.1."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            connections = process.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        found |= {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}
    return {(address, port) for address, port in found if address != "127.0.0.1"}
