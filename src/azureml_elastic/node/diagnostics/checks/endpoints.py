"""The way to a service's host: its name, its port and its certificate, each with the time that it took."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from azureml_elastic.node.diagnostics.findings import Finding
from azureml_elastic.node.host.addresses import format_address
from azureml_elastic.node.rendezvous.reachability.reachability import describe_error

__all__ = ["check_host", "check_peer"]

_SECONDS = 5.0
_LONGEST_REPLY = 65536
_PORTS = {"http": 80, "https": 443}


def check_host(what: str, url: str, environ: Mapping[str, str]) -> Finding:
    """Connect to a service as its clients do: by a proxy where the environment names one, and over TLS.

    Args:
        what: the service is, in words.
        url: URL of the service.
        environ: environment variables that name the trusted certificates.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or _PORTS[parts.scheme]
    proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    by = urlsplit(proxy) if proxy else None
    nearest = (by.hostname or "", by.port or _PORTS["http"]) if by else (host, port)
    steps: list[str] = []
    with contextlib.ExitStack() as stack:
        try:
            with _timed(steps, "name"):
                found = socket.getaddrinfo(*nearest, type=socket.SOCK_STREAM)
            address = found[0][4][0]
            with _timed(steps, "TCP"):
                connection = stack.enter_context(socket.create_connection(nearest, _SECONDS))
            if by is not None and parts.scheme == "https":
                with _timed(steps, "proxy"):
                    _ask_proxy(connection, host, port, by.username, by.password)
            if parts.scheme == "https":
                with _timed(steps, "TLS"):
                    stack.enter_context(_context(environ).wrap_socket(connection, server_hostname=host))
        except OSError as error:
            where = f"{host}" if by is None else f"{host} by the proxy {nearest[0]}:{nearest[1]}"
            return Finding(what, "fail", f"{where}: {_said(error)}", "", _advice(error, host, port, proxied=bool(by)))
    kind = " (private)" if ipaddress.ip_address(str(address).partition("%")[0]).is_private else ""
    way = f"at {address}{kind}" if by is None else f"by the proxy {nearest[0]}:{nearest[1]}"
    return Finding(what, "ok", f"{host} {way}: {', '.join(steps)}")


def check_peer(host: str, port: int) -> Finding:
    """Connect to a port of another node."""
    name = f"peer {format_address(host, port)}"
    began = time.monotonic()
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except ConnectionRefusedError:
        advice = "The way there is free, but nobody listens on that port. Start a node there, or name its port."
        return Finding(name, "fail", "the machine answers and refuses", "", advice)
    except OSError as error:
        advice = (
            "Nodes in different clusters need one virtual network; open the ports of port_range= between them, or set "
            "advertise= to the interface by which they reach each other (docs/how-to/network.md)."
        )
        return Finding(name, "fail", describe_error(error, _SECONDS), "", advice)
    return Finding(name, "ok", f"accepts a connection after {_ms(began)}")


@contextlib.contextmanager
def _timed(steps: list[str], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    steps.append(f"{name} {_ms(began)}")


def _ms(began: float) -> str:
    return f"{(time.monotonic() - began) * 1000:.0f} ms"


def _ask_proxy(connection: socket.socket, host: str, port: int, user: str | None, password: str | None) -> None:
    """Have a proxy connect to a host.

    Raises:
        OSError: it does not.
    """
    lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}"]
    if user is not None:
        login = b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {login}")
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    reply = b""
    while b"\r\n\r\n" not in reply and len(reply) < _LONGEST_REPLY:
        data = connection.recv(4096)
        if not data:
            break
        reply += data
    status = reply.split(b"\r\n", 1)[0].decode(errors="replace")
    if " 200" not in status[: len("HTTP/1.1 200")]:
        raise OSError(f"the proxy says {status or 'nothing'!r}")


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return a TLS context with the system's certificates and those of ``REQUESTS_CA_BUNDLE``, as Azure's clients."""
    context = ssl.create_default_context()
    bundle = environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE")
    if bundle and os.path.exists(bundle):  # noqa: PTH110 - a path of the environment's
        if os.path.isdir(bundle):  # noqa: PTH112
            context.load_verify_locations(capath=bundle)
        else:
            context.load_verify_locations(cafile=bundle)
    return context


def _said(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return describe_error(error, _SECONDS)


def _advice(error: OSError, host: str, port: int, *, proxied: bool) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "Something in between, such as a proxy, opens TLS. Give its certificate to both kinds of clients: set "
            "REQUESTS_CA_BUNDLE and SSL_CERT_FILE to a file that holds it beside the public ones."
        )
    if isinstance(error, ssl.SSLError):
        return f"Something in between does not pass TLS on. Let port {port} of {host} through unchanged."
    if isinstance(error, socket.gaierror):
        if proxied:
            return "Correct the proxy's name in HTTPS_PROXY."
        return (
            f"Check the name {host}, and the machine's DNS. An account with a private endpoint needs the private DNS "
            "zone privatelink.table.core.windows.net linked to the nodes' virtual network."
        )
    if proxied:
        return f"Have the proxy let {host}:{port} through, or name another one in HTTPS_PROXY."
    return (
        f"Open outbound TCP {port} to {host}: the service tags are AzureResourceManager, Storage and "
        "AzureActiveDirectory. Where only a proxy leads out, set HTTPS_PROXY."
    )
