"""The ports on which processes that a test has started listen."""

from __future__ import annotations

import psutil


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
