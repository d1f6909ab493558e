"""The process that serves the key-value store of a round; ``python -m`` starts it where it cannot be forked.

A forked one receives later what to serve. The process answers each byte on its connection to the agent with a line of
JSON that has the number of keys, and ends when the agent closes that connection or ends itself. The traceback of an
error that ends it is its last line: standard error of a forked one is seen by nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from azureml_elastic.forks.link import receive

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

STORE_TIMEOUT = timedelta(minutes=5)
"""Timeout of single operations of the store."""


_LONGEST_ERROR = 32_000


def libuv_listens(version: str) -> bool:
    """Return whether the libuv backend of a release of torch takes over a socket that listens already."""
    major, minor, rest = version.split(".", 2)
    early = re.match(r"\d+(a|b|rc|\.dev)", rest) is not None  # a build of the time before the release
    return (int(major), int(minor), not early) >= (2, 8, True)


def listening_store(host: str, port: int, listener: int, timeout: timedelta) -> TCPStore:
    """Serve a store on a socket that listens already.

    Args:
        listener: descriptor of the socket, which the store closes.

    Raises:
        RuntimeError: torch cannot serve it.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener,
        use_libuv=libuv_listens(torch.__version__),
    )


def serve_store(host: str, port: int, listener: int, control: int) -> NoReturn:
    """Serve the store until the control connection closes."""
    link = socket.socket(fileno=control)
    code = 0
    with contextlib.suppress(ConnectionError):  # the agent has ended
        try:
            store = listening_store(host, port, listener, STORE_TIMEOUT)
            while link.recv(1):
                link.sendall(b"%d\n" % store.num_keys())
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the agent says it
            code = 1
            link.sendall(json.dumps(traceback.format_exc()[-_LONGEST_ERROR:]).encode() + b"\n")
    os._exit(code)


def serve_when_asked(server: socket.socket) -> NoReturn:
    """Import what the store needs, wait for the store's address and descriptors, and serve it.

    Args:
        server: connection to the preload server, with whose end this process ends.
    """
    with contextlib.suppress(Exception):  # it is raised again when the store is wanted, and reported
        import torch.distributed  # noqa: F401
    with server:
        order, descriptors = receive(server)
    if order is None:
        os._exit(0)
    serve_store(order["host"], order["port"], *descriptors)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM):  # for the agent to act on, which ends this process
        signal.signal(_number, signal.SIG_IGN)
    serve_store(sys.argv[1], *map(int, sys.argv[2:]))
