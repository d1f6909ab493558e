"""The link between a fork server and its client: a ``SOCK_SEQPACKET`` socket, on which messages are received whole.

A message is JSON, with descriptors. What may be longer, such as an environment, is a document: JSON in a file without a
name, whose descriptor is sent::

    client: {"op": "begin"}                             with a document: the environment of the workers
    client: {"op": "fork", "id": 7, "folder": "/home"}  with a document, the worker's environment, and stdout, stderr
    client: {"op": "detach", "id": 7, "become": "..."}  with a document, a gate and what the function needs, see below
    client: {"op": "store", "id": 7, "host": "10.0.0.4", "port": 29400}   with a listening socket and a connection
    server: {"op": "started", "id": 7, "pid": 4711}  or  {"op": "declined", "id": 7, "reason": "..."}
    server: {"op": "ended", "pid": 4711, "code": -9}    a worker or store, a zombie, which reserves its id, until
    client: {"op": "reap", "pid": 4711}
    server: {"op": "ready", "seconds": 2.1, "imports": 12, "excluded": {}}  or  {"op": "unsafe", "reason": "..."}
    server: {"op": "settled"}                           once torch's later imports are made

A *worker* is a child of the server, and ends with it. A *detached* process is a child of the client, which is a
subreaper, and goes on without the server. It waits at its gate, a pipe, until the client has its id and has written
:data:`GO`. Then ``become``, ``module:name``, is called with the document's ``request``, the remaining descriptors and
what the server has imported; it returns the call that runs the process. The document has its ``environment`` and
``folder``, too.

The process that serves a round's store ends with its connection to the agent.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

GO = b"-"
"""What a detached process waits for, so that none runs whose id its parent does not know."""

MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8


def send(link: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message.

    Raises:
        OSError: the other end is closed.
    """
    socket.send_fds(link, [json.dumps(message).encode()], list(descriptors))


def receive(link: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Wait for a message; return it, ``None`` where the other end is closed, and its descriptors.

    Raises:
        OSError: this end is closed, or the other end was with messages that nobody has received.
    """
    data, descriptors, _, _ = socket.recv_fds(link, MOST_BYTES, _MOST_DESCRIPTORS)
    return (json.loads(data) if data else None), descriptors


def read_document(descriptor: int) -> Any:
    """Read a document and close its descriptor."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return json.loads(file.read())
