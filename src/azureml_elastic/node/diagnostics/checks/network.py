"""Checks of what this machine reaches: the table's clock, hubs, peers and services."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from azureml_elastic.environment.names import LOCAL_ADDRESS
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.diagnostics.findings import Finding, Status
from azureml_elastic.node.host.addresses import format_address
from azureml_elastic.node.rendezvous.context import Runtime
from azureml_elastic.node.rendezvous.reachability import describe_error, is_unreachable
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY
from azureml_elastic.node.table import Table
from azureml_elastic.node.table.server_time import ServerClock

_CONNECT_SECONDS = 1.2
"""Time limit in health checks; TCP makes a second attempt after one second."""

_PEER_SECONDS = 5.0
"""Time limit in the doctor."""

_MAX_PEERS = 3

_ALIVE_INTERVALS = 3
"""Age of the last table heartbeat, in intervals, from which a round may have ended."""

_ADVICE = (
    "Allow TCP between the nodes (port_range= of TableRendezvous limits the ports), or set its advertise=, or on this "
    f"node {LOCAL_ADDRESS}, to an address that the others can reach (docs/how-to/nodes.md)."
)


_SKEW_SECONDS, _SKEW_WARNING_SECONDS = 900.0, 60.0
"""Differences to the server's clock; a machine that is further off than the first gets its access tokens refused."""


def check_clock(clock: ServerClock) -> Finding:
    """Compare this machine's clock with that of the table's server, which rejects tokens if the difference is large.

    Raises:
        TableError, UsageError: the table cannot be read.
    """
    skew = clock.reading().skew
    value = f"{abs(skew):.1f} s {'behind' if skew < 0 else 'ahead of'} the table's server"
    limit = f"at most {_SKEW_SECONDS:g} s, better {_SKEW_WARNING_SECONDS:g} s"
    status: Status = "ok" if abs(skew) <= _SKEW_WARNING_SECONDS else "fail" if abs(skew) > _SKEW_SECONDS else "warn"
    advice = "Synchronize the machine's clock with a time server (chrony, timesyncd)."
    return Finding("clock", status, value, limit, advice)


def check_hub(host: str, port: int) -> Finding:
    """Connect to this node's own port, as the other nodes do."""
    name, limit = "own port", "accepts a connection"
    error, local = _probe((host, port), ("::1" if ":" in host else "127.0.0.1", port))
    if error is None:
        return Finding(name, "ok", f"{host}:{port} accepts", limit)
    problem = f"{host}:{port}: {describe_error(error, _CONNECT_SECONDS)}"
    if local is not None:
        advice = "Something on this machine, perhaps a firewall, blocks incoming connections."
        return Finding(name, "fail", problem, limit, advice)
    return Finding(name, "warn", f"{problem}; it accepts on the loopback address", limit, _ADVICE)


def check_peer(host: str, port: int) -> Finding:
    """Connect to a port of another node."""
    name = f"peer {format_address(host, port)}"
    began = time.monotonic()
    (error,) = _probe((host, port), seconds=_PEER_SECONDS)
    if error is None:
        return Finding(name, "ok", f"accepts a connection after {(time.monotonic() - began) * 1000:.0f} ms")
    if not is_unreachable(error):
        advice = "The machine is reachable, but nothing listens on that port. Start a node there, or correct the port."
        return Finding(name, "fail", "the machine answers and refuses", "", advice)
    advice = (
        "Nodes in different clusters need one virtual network; open the ports of port_range= between them, or set "
        "advertise= to the interface by which they reach each other (docs/how-to/nodes.md)."
    )
    return Finding(name, "fail", describe_error(error, _PEER_SECONDS), "", advice)


def check_peers(table: Table, clock: ServerClock, node: str, table_heartbeat_interval: timedelta) -> Finding:
    """Connect to members of the running round, if there is one.

    Unreachable members are this node's fault only if the round is alive. That is decided by times of the server alone:
    those of the heartbeat row and of a row that this node has just written.

    Raises:
        TableError, UsageError: the table cannot be read.
    """
    name, limit = "peers", "rank 0's node accepts a connection"
    row = table.get(ROUND_KEY)
    round_ = Round.from_value(row.value) if row is not None else Round()
    members = [member for member in round_.members if member.node != node][:_MAX_PEERS]
    if round_.state != "sealed" or not members:
        return Finding(name, "ok", "no round of other nodes is running", limit)
    first, *others = _probe(*((member.host, member.hub_port) for member in members))
    where = f"{members[0].node} at {members[0].host}:{members[0].hub_port}"
    if first is None:
        return Finding(name, "ok", f"{where}: accepts", limit)
    if not is_unreachable(first):  # the rendezvous notices the loss of the node
        return Finding(name, "ok", f"{where}: refuses, so that it is reached", limit)
    problem = f"{where}: {describe_error(first, _CONNECT_SECONDS)}"
    if any(error is None or not is_unreachable(error) for error in others):
        return Finding(name, "warn", f"{problem}; but other members can be reached", limit, _ADVICE)
    heartbeat = table.get(TABLE_HEARTBEAT_KEY)
    age = clock.now() - heartbeat.timestamp if heartbeat is not None else timedelta.max
    if age < _ALIVE_INTERVALS * table_heartbeat_interval:
        value = f"{problem}; round {round_.number} gave a sign of life {age.total_seconds():.0f} s ago"
        return Finding(name, "fail", value, limit, _ADVICE)
    return Finding(name, "warn", f"{problem}; round {round_.number} may have ended", limit, _ADVICE)


def _probe(*addresses: tuple[str, int], seconds: float | None = None) -> list[OSError | None]:
    """Connect to all addresses at once, as the rendezvous does; return the error of each."""
    return Runtime().probe(addresses, _CONNECT_SECONDS if seconds is None else seconds)


_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443}


def check_host(what: str, url: str, environment: NodeEnvironment) -> Finding:
    """Connect to a service as its clients do: through the proxy of the environment, if any, and over TLS.

    Args:
        environment: environment variables that name the trusted certificates.
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
                    stack.enter_context(_tls_context(environment).wrap_socket(connection.sock, server_hostname=host))
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


def _tls_context(environment: NodeEnvironment) -> ssl.SSLContext:
    """Return a context with the certificates of the system and of ``REQUESTS_CA_BUNDLE``, as in Azure's clients."""
    context = ssl.create_default_context()
    bundle = environment.certificates
    if bundle is None:
        return context
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
