"""The base of the HTTP servers of this machine: those that stand in for Azure, and the dashboard.

Requests have limits, malformed ones are refused with a status, and the end of a server ends all its connections and
their threads.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import BinaryIO

from typing_extensions import Self

_CHUNK = 1 << 20
_MAX_BODY = 256 << 20
"""Largest body in bytes; Azure's SDKs send at most 64 MiB at once."""

_IDLE_S = 600.0
"""Longest time in seconds for which a client may send nothing or read nothing."""


class RequestRefused(ValueError):
    """A request that is not handled.

    Args:
        status: status of the response, after which the connection is closed.
    """

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_body(headers: Message, reader: BinaryIO | BufferedIOBase, limit: int = _MAX_BODY) -> bytes:
    """Return the body of a request.

    Args:
        reader: stream that continues with the body.

    Raises:
        RequestRefused: the length is missing, malformed or too large.
        ConnectionError: the client has closed the connection before the end of the body.
    """
    if "Transfer-Encoding" in headers:  # what is not read of such a body would be taken for the next request
        raise RequestRefused(HTTPStatus.LENGTH_REQUIRED, "Send a Content-Length instead of a Transfer-Encoding.")
    lengths = set(headers.get_all("Content-Length", ["0"]))
    length = lengths.pop().strip()
    if lengths or not (length.isascii() and length.isdigit()):
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "The Content-Length is not one number.")
    # Of thousands of digits int() makes no number, or takes long.
    size = int(length) if len(length) <= len(str(limit)) else limit + 1
    if size > limit:
        raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is longer than {limit} bytes.")
    # In pieces: one read of the whole length takes the memory for it before the first byte has come.
    pieces, left = [], size
    while left:
        piece = reader.read(min(left, _CHUNK))
        if not piece:
            raise ConnectionResetError(f"The client closed the connection after {size - left} of {size} bytes.")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


class Server(ThreadingHTTPServer):
    """A server with a thread for each connection, a context manager that serves in a thread of its own.

    Args:
        address: address to listen on, by default a free port of this machine's loopback; port 0 is a free one.
    """

    # Of daemon threads the base class keeps no list, and server_close() would not wait for them.
    daemon_threads = False
    # Nodes of a run connect at once. With the default of 5 some connections would be tried again a second later.
    request_queue_size = 256

    def __init__(self, handler: type[Handler], address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server and all connections, and wait for the end of their threads."""
        self.shutdown()
        self._thread.join()
        with self._lock:
            self._closed = True
            connections = list(self._open)
        # Before server_close(), which waits for the handlers: each reads until its connection ends.
        for connection in connections:
            _shut(connection)
        self.server_close()

    def keep(self, connection: socket.socket) -> None:
        """Register a connection to be closed with the server."""
        with self._lock:
            self._open.add(connection)
            # The connection may have been accepted before the end of the server and be registered after it.
            closed = self._closed
        if closed:
            _shut(connection)

    def forget(self, connection: socket.socket) -> None:
        """Unregister a closed connection."""
        with self._lock:
            self._open.discard(connection)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close connections or are killed, which may happen at any time."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type] # typeshed names the sockets alone


class Handler(BaseHTTPRequestHandler):
    """Handler of a connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _IDLE_S

    def setup(self) -> None:
        """Register the connection."""
        super().setup()
        assert isinstance(self.server, Server)
        self.server.keep(self.connection)

    def finish(self) -> None:
        """Close the connection."""
        assert isinstance(self.server, Server)
        with contextlib.suppress(OSError, ValueError):
            super().finish()
        self.server.forget(self.connection)
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""

    def read_body(self) -> bytes | None:
        """Return the request's body; ``None`` if the request was refused, after which the connection is closed."""
        try:
            return read_body(self.headers, self.rfile)
        except RequestRefused as error:
            self.send_error(error.status, str(error))
        except ConnectionError:
            self.close_connection = True
        return None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
