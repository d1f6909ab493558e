"""A server of one page, which only shows: it answers GET requests of ``/`` and nothing else.

On the loopback it answers requests that name the loopback as their host, so that no other web site can read the page by
a name of its own that it lets resolve to this machine. On any other address each request needs the token of the URL.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from azureml_elastic.errors import UsageError
from azureml_elastic.local.http_server import Handler, Server

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
        """Return why a request is refused; ``None`` if it is not."""
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

    def do_GET(self) -> None:  # noqa: N802 - http.server calls it
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
