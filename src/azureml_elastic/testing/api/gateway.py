"""The gateway of a local workspace: an HTTPS proxy that responds for the workspace's hosts and tunnels to all others.

Clients find it through ``HTTPS_PROXY`` and trust it through a certificate bundle, so the SDK and the nodes call
``https://management.azure.com`` unmodified. Plain requests to the proxy itself are those that Azure ML serves on a
node, such as token requests.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import socket
import ssl
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from azureml_elastic.errors import UsageError, needs_extra
from azureml_elastic.local.http_server import Handler, Server
from azureml_elastic.testing.messages import Answer, NotFound, Request, document, refusal

with needs_extra("trustme", "testing"):
    import trustme


_CONNECT_TIMEOUT_S = 30.0
_CHUNK = 65536
_PORTS = 65536
_SELF = "node"
"""Host name of plain requests."""


class Gateway(Server):
    """A context manager that runs the proxy on a free port of this machine.

    Each gateway has a certificate authority of its own, whose keys never leave this process.
    """

    def __init__(self, hosts: dict[str, Callable[[Request], Answer]], own: Callable[[Request], Answer]) -> None:
        self._authority = trustme.CA(organization_name="azureml-elastic local workspace")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(*sorted(hosts)).configure_cert(self.context)
        self.hosts = {**hosts, _SELF: own}
        super().__init__(_Handler)

    @property
    def address(self) -> str:
        """URL of the proxy for ``HTTPS_PROXY``."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def write_bundle(self, target: Path, trusted: Path | None = None) -> Path:
        """Write a bundle of the trusted certificates, by default certifi's, and the gateway's authority.

        Returns:
            Path of the bundle, which is ``target``.
        """
        if trusted is None:
            import certifi

            trusted = Path(certifi.where())
        authority = self._authority.cert_pem.bytes().decode()
        target.write_text(f"{trusted.read_text(encoding='utf-8').rstrip()}\n{authority}", encoding="utf-8")
        return target


class _Handler(Handler):
    server: Gateway

    def setup(self) -> None:
        super().setup()
        self._host = _SELF

    def do_CONNECT(self) -> None:  # noqa: N802 - the base class's name
        host, _, port = self.path.rpartition(":")
        if self._host != _SELF or not (port.isascii() and port.isdigit() and int(port[:6]) < _PORTS):
            self.send_error(HTTPStatus.BAD_REQUEST, "Connect to <host>:<port>, outside of another connection.")
            return
        if host not in self.server.hosts:
            self._tunnel(host, int(port))
            return
        self.send_response(HTTPStatus.OK, "Connection established")
        self.end_headers()
        # wrap_socket() takes the descriptor from the plain socket, which can no longer be shut down.
        self.server.forget(self.connection)
        plain = self.connection
        try:
            self.connection = self.server.context.wrap_socket(plain, server_side=True)
        except OSError:
            self.close_connection = True
            plain.close()
            return
        self.server.keep(self.connection)
        # setup() has made both for the plain socket.
        self.rfile.close()
        self.rfile = self.connection.makefile("rb", -1)
        self.wfile = self.connection.makefile("wb", 0)
        self._host = host
        self.close_connection = False

    def do_GET(self) -> None:  # noqa: N802 - as above
        body = self.read_body()
        if body is None:
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self._host, self.path, headers, body)
        try:
            answer = self.server.hosts[self._host](request)
        except UsageError as error:
            missing = isinstance(error, NotFound)
            answer = refusal(404 if missing else 400, "NotFound" if missing else "UserError", str(error))
        except Exception as error:  # noqa: BLE001 - every error is reported to the client
            answer = refusal(500, "InternalServerError", f"the local workspace failed: {error!r}")
        self.send_response(answer.status)
        named = {name.lower() for name, _ in answer.headers}
        for name, value in answer.headers:
            self.send_header(name, value)
        if "content-length" not in named and answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_DELETE = do_HEAD = do_MERGE = do_OPTIONS = do_PATCH = do_POST = do_PUT = do_GET  # noqa: N815 - names of methods

    def _tunnel(self, host: str, port: int) -> None:
        self.close_connection = True
        try:
            other = socket.create_connection((host.strip("[]"), port), _CONNECT_TIMEOUT_S)
        except (OSError, UnicodeError) as error:  # a name that is none cannot be encoded
            self.send_error(HTTPStatus.BAD_GATEWAY, f"{host}:{port} cannot be reached: {error}")
            return
        with other:
            self.server.keep(other)  # so that the end of the gateway ends the tunnel
            self.send_response(HTTPStatus.OK, "Connection established")
            self.end_headers()
            with contextlib.suppress(OSError):
                _relay(self.connection, other)
            self.server.forget(other)


def _relay(one: socket.socket, other: socket.socket) -> None:
    to = {one: other, other: one}
    while True:
        for source in select.select([one, other], [], [])[0]:
            data = source.recv(_CHUNK)
            if not data:
                return
            to[source].sendall(data)


_TOKEN_S = 3600


class StaticCredential:
    """Credential that issues unsigned tokens."""

    def get_token(self, *scopes: str, **_: Any) -> Any:
        """Return a token for the first scope."""
        from azure.core.credentials import AccessToken

        expires = int(time.time()) + _TOKEN_S
        return AccessToken(_mint(scopes[0], expires), expires)


def _mint(scope: str, expires: int) -> str:
    audience = scope.removesuffix("/.default")
    claims = {"aud": audience, "tid": "local", "oid": "local", "exp": expires}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in ({"alg": "none"}, claims)]
    return ".".join([*(part.rstrip("=") for part in parts), ""])


def signed_in(answer: Callable[[Request], Answer], public: Collection[str] = ()) -> Callable[[Request], Answer]:
    """Return a request handler that refuses requests without a token.

    Args:
        public: beginnings of the paths that need no token.
    """

    def checked(request: Request) -> Answer:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if (scheme.lower() == "bearer" and token) or request.path.startswith(tuple(public)):
            return answer(request)
        return refusal(401, "AuthenticationFailed", "Authentication failed. The header 'Authorization' has no token.")

    return checked


def answer_node(request: Request) -> Answer:
    """Respond as the token service of a node."""
    if request.path != "/token":
        raise NotFound(f"A node of the local workspace serves tokens only, not {request.path}.")
    resource = {**request.query, **dict(parse_qsl(request.body.decode(errors="replace")))}.get("resource")
    if resource is None:
        raise UsageError("Give the resource that the token is for.")
    expires = int(time.time()) + _TOKEN_S
    return document(
        {
            "access_token": _mint(resource, expires),
            "expires_in": str(_TOKEN_S),
            "expires_on": str(expires),
            "resource": resource,
            "token_type": "Bearer",
        }
    )
