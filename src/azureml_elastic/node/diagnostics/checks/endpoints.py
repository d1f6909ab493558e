"""Check of the connection to a service: name resolution, TCP or proxy, and TLS, with their durations."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from azureml_elastic.node.diagnostics.findings import Finding
from azureml_elastic.node.rendezvous.reachability.reachability import describe_error

__all__ = ["check_host"]

_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443}


def check_host(what: str, url: str, environ: Mapping[str, str]) -> Finding:
    """Connect to a service as its clients do: through the proxy of the environment, if any, and over TLS.

    Args:
        what: name of the finding.
        url: URL of the service.
        environ: environment variables that name the trusted certificates.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    proxy_url = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    proxy = urlsplit(proxy_url) if proxy_url else None
    nearest = (proxy.hostname or "", proxy.port or _PORTS["http"]) if proxy else (host, port)
    by_proxy = f"by the proxy {nearest[0]}:{nearest[1]}" if proxy else ""
    tls = parts.scheme == "https"
    steps: list[str] = []
    with contextlib.ExitStack() as stack:
        try:
            with _timed(steps, "name"):
                address = socket.getaddrinfo(*nearest, type=socket.SOCK_STREAM)[0][4][0]
            connection = http.client.HTTPConnection(*nearest, timeout=_SECONDS)
            stack.callback(connection.close)
            if proxy is not None and tls:
                login = b64encode(f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}".encode()).decode()
                headers = {"Proxy-Authorization": f"Basic {login}"} if proxy.username is not None else {}
                connection.set_tunnel(host, port, headers)
            with _timed(steps, "proxy" if proxy else "TCP"):
                connection.connect()
            if tls:
                with _timed(steps, "TLS"):
                    stack.enter_context(_tls_context(environ).wrap_socket(connection.sock, server_hostname=host))
        except (OSError, http.client.HTTPException) as error:
            problem = f"{host} {by_proxy}".strip() + f": {_describe(error)}"
            return Finding(what, "fail", problem, "", _advice(error, host, port, proxied=proxy is not None))
    private = " (private)" if ipaddress.ip_address(str(address).partition("%")[0]).is_private else ""
    return Finding(what, "ok", f"{host} {by_proxy or f'at {address}{private}'}: {', '.join(steps)}")


@contextlib.contextmanager
def _timed(steps: list[str], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    steps.append(f"{name} {(time.monotonic() - began) * 1000:.0f} ms")


def _tls_context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return a context with the certificates of the system and of ``REQUESTS_CA_BUNDLE``, as in Azure's clients."""
    context = ssl.create_default_context()
    bundle = Path(environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE") or "/nonexistent")
    if bundle.is_dir():
        context.load_verify_locations(capath=bundle)
    elif bundle.exists():
        context.load_verify_locations(cafile=bundle)
    return context


def _describe(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return describe_error(error, _SECONDS) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _advice(error: Exception, host: str, port: int, *, proxied: bool) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "A proxy or firewall between this machine and the service decrypts TLS. Set REQUESTS_CA_BUNDLE and "
            "SSL_CERT_FILE to a file that contains its certificate and the public ones."
        )
    if isinstance(error, ssl.SSLError):
        return f"A proxy or firewall does not pass TLS on. Let port {port} of {host} through unchanged."
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
        "AzureActiveDirectory. If the network has a proxy, set HTTPS_PROXY."
    )
