"""The process that serves the key-value store of a round; ``python -m`` starts it where it cannot be forked.

A forked one receives later what to serve. The process answers each byte on its connection to the agent with a line that
has the number of keys, and ends when the agent closes that connection or ends itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from datetime import timedelta
from typing import NoReturn

__all__ = ["STORE_TIMEOUT", "serve_store"]

STORE_TIMEOUT = timedelta(minutes=5)
"""Timeout of single operations of the store."""


def serve_store(host: str, port: int, listener: int, control: int) -> NoReturn:
    """Serve the store until the control connection closes.

    Args:
        host: address of the store, as its clients know it.
    """
    link = socket.socket(fileno=control)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=listener
    )
    with contextlib.suppress(OSError):
        while link.recv(1):
            link.sendall(b"%d\n" % store.num_keys())
    os._exit(0)


def serve_when_asked(server: socket.socket) -> NoReturn:
    """Import what the store needs, wait for the store's address and descriptors, and serve it.

    Args:
        server: connection to the preload server, with whose end this process ends.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: F401

    with server:
        order, descriptors, _, _ = socket.recv_fds(server, 1 << 16, 2)
    if not order:
        os._exit(0)
    address = json.loads(order)
    serve_store(address["host"], address["port"], *descriptors)


if __name__ == "__main__":
    serve_store(sys.argv[1], *map(int, sys.argv[2:]))
