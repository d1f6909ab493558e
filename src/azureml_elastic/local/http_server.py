"""The base of the HTTP servers of this machine: those that stand in for Azure, and the dashboard.

Requests have limits, malformed ones are refused with a status, and the end of a server ends all its connections and
their threads.

**A server of one page, which only shows: it answers GET requests of ``/`` and nothing else.** On the loopback it
answers requests that name the loopback as their host, so that no other web site can read the page by a name of its own
that it lets resolve to this machine. On any other address each request needs the token of the URL.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import BinaryIO
from urllib.parse import parse_qs, urlsplit

from typing_extensions import Self

from azureml_elastic.errors import UsageError

_CHUNK = 1 << 20
_MAX_BODY = 256 << 20
"""Largest body in bytes; Azure's SDKs send at most 64 MiB at once."""

_IDLE_S = 600.0
"""Longest time in seconds for which a client may send nothing or read nothing."""


class RequestRefused(ValueError):
    """A request that is not handled.

    Args:
        status: status of the response, after which the connection is closed.
        message: what is wrong with the request.
    """

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_body(headers: Message, reader: BinaryIO | BufferedIOBase, limit: int = _MAX_BODY) -> bytes:
    """Return the body of a request.

    Args:
        reader: stream that continues with the body.
        limit: largest length in bytes.

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


_TOKEN_BYTES = 24
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(Server):
    """Server of a page.

    Args:
        page: function that returns the page; calls may overlap.

    Raises:
        UsageError: the server cannot listen there.
    """

    def __init__(self, page: Callable[[], bytes], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.page = page
        self.token = None if _is_loopback(host) else secrets.token_urlsafe(_TOKEN_BYTES)
        """Secret that each request has; ``None`` on the loopback."""
        self._host = host
        try:
            super().__init__(_PageHandler, (host, port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"The dashboard cannot listen on {host}, port {port} ({error}). Give another --port, 0 for a free one, "
                "or another --host."
            ) from error

    @property
    def url(self) -> str:
        """URL of the page, with the token if it needs one."""
        host = socket.gethostname() if _is_wildcard(self._host) else self._host
        base = f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"
        return base if self.token is None else f"{base}?token={self.token}"

    def refusal(self, target: str, host: str) -> tuple[HTTPStatus, str] | None:
        """Return why a request is refused; ``None`` if it is not.

        Args:
            target: target of the request.
            host: header ``Host``.
        """
        try:
            parts = urlsplit(target)
        except ValueError:
            return HTTPStatus.BAD_REQUEST, "The request has no valid target."
        if self.token is None:
            if not _is_loopback(_host_of(host)):
                return HTTPStatus.FORBIDDEN, f"Open {self.url}: this server answers to no other name."
        else:
            given = parse_qs(parts.query).get("token", [""])[0]
            # The time of a plain comparison would tell how much of a guessed token is right.
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                return (
                    HTTPStatus.FORBIDDEN,
                    "Open the URL that 'azureml-elastic report --serve' has printed, with its token.",
                )
        return None if parts.path == "/" else (HTTPStatus.NOT_FOUND, "There is one page, at /.")


class _PageHandler(Handler):
    """Handler of a connection."""

    server_version = "azureml-elastic"
    sys_version = ""
    timeout = 60.0
    server: PageServer

    def parse_request(self) -> bool:
        """Return whether the request is well-formed and a GET; any other one is refused."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._send_text(HTTPStatus.METHOD_NOT_ALLOWED, "The page can only be read, with GET.", {"Allow": "GET"})
            return False
        return True

    def do_GET(self) -> None:
        """Send the page, or only that it has not changed."""
        refusal = self.server.refusal(self.path, self.headers.get("Host", ""))
        if refusal is not None:
            self._send_text(*refusal)
            return
        page = self.server.page()
        tag = f'"{hashlib.sha256(page).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag})
        else:
            self._send(HTTPStatus.OK, page, {"ETag": tag, "Content-Type": "text/html; charset=utf-8"})

    def _send_text(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> None:
        """Send a refusal and close the connection, as the request may have a body."""
        self.close_connection = True
        body = b"" if self.command == "HEAD" else f"{text}\n".encode()
        types = {"Content-Type": "text/plain; charset=utf-8", "Connection": "close"}
        self._send(status, body, {**types, **(headers or {})})

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _host_of(header: str) -> str:
    """Return the host of a ``Host`` header without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
