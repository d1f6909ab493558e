"""The link between a fork server and its client: a ``SOCK_SEQPACKET`` socket, on which messages are received whole.

A message is JSON, with descriptors. What may be longer, such as an environment, is a document: JSON in a file without a
name, whose descriptor is sent::

    client: {"op": "begin"}                             with a document: the environment of the workers
    client: {"op": "fork", "id": 7, "folder": "/home"}  with a document, the worker's environment, and stdout, stderr
    client: {"op": "detach", "id": 7, "become": "..."}  with a document, a gate and what the function needs, see below
    client: {"op": "store", "id": 7, "host": "10.0.0.4", "port": 29400}   with a listening socket and a connection
    server: {"op": "started", "id": 7, "pid": 4711}  or  {"op": "serving", "id": 7, "pid": 4711}  for a store,
            or  {"op": "declined", "id": 7, "reason": "..."}
    server: {"op": "ended", "pid": 4711, "code": -9}    the worker stays a zombie, which reserves its id, until
    client: {"op": "reap", "pid": 4711}
    server: {"op": "store ended", "pid": 4711, "code": 0}
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

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

__all__ = ["GO", "MOST_BYTES", "ForkRefused", "ServerProcess", "document", "read_document", "receive", "send"]

GO = b"-"
"""What a detached process waits for, so that none runs whose id its parent does not know."""

MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8
_END_SECONDS = 2.0


class ForkRefused(Exception):
    """The server cannot fork a process, for the reason in the message; it must be started by its command."""


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


@contextlib.contextmanager
def document(content: Any) -> Iterator[int]:
    """Yield the descriptor of a file without a name that holds a document."""
    with _anonymous_file() as file:
        file.write(json.dumps(content).encode())
        file.flush()
        yield file.fileno()


def read_document(descriptor: int) -> Any:
    """Read a document and close its descriptor."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return json.loads(file.read())


def _anonymous_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("azureml-elastic"), "w+b")
    return tempfile.TemporaryFile()


class ServerProcess:
    """A fork server that this process has started, with this process's end of the link.

    Args:
        command: function that returns the server's command for the descriptor of its end.
        popen: function that starts the process, with the arguments of ``subprocess.Popen``.
        options: further arguments for it.

    Raises:
        ForkRefused: the process cannot be started.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environ: Mapping[str, str],
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        **options: Any,
    ) -> None:
        if sys.platform != "linux":
            raise ForkRefused(f"{sys.platform} is not Linux")
        self.link, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = _anonymous_file()
        words = command(server_end.fileno())
        with server_end, _anonymous_file() as output:
            try:
                self._process = popen(
                    words,
                    env=dict(environ),
                    stdout=output,
                    stderr=self._errors,
                    pass_fds=[server_end.fileno()],
                    start_new_session=True,
                    **options,
                )
            except OSError as error:
                self.close()
                raise ForkRefused(f"{words[0]!r} cannot be started: {error.strerror}") from error
        self.pid = self._process.pid

    def receive(self) -> dict[str, Any] | None:
        """Wait for the server's next message; return ``None`` if it has ended."""
        with contextlib.suppress(OSError):
            return receive(self.link)[0]
        return None

    def kill(self) -> None:
        """Kill the server."""
        self._process.kill()

    def disconnect(self) -> None:
        """Let the server end: it kills its workers and exits."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait(self) -> tuple[int, str]:
        """Wait for the server's end, kill it if that does not come; return the exit code and the end in words."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        if code < 0:
            return code, f"has ended by {signal.Signals(-code).name}"
        lines = [""]
        with contextlib.suppress(OSError, ValueError):
            lines = os.pread(self._errors.fileno(), MOST_BYTES, 0).decode(errors="replace").strip().split("\n")
        return code, f"has ended with exit code {code}" + (f": {lines[-1].strip()}" if lines[-1] else "")

    def close(self) -> None:
        """Close this end of the link, and what the server has written."""
        self.link.close()
        self._errors.close()
