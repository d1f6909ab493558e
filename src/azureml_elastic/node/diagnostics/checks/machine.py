"""Checks of this machine and its network: packages, address, ports, memory, files, peers, clock and services."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import ipaddress
import os
import re
import resource
import socket
import ssl
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from azureml_elastic.config import TableRendezvous
from azureml_elastic.config.rendezvous import PORTS_OF_A_NODE
from azureml_elastic.environment.names import LOCAL_ADDRESS
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.memory import available_memory
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.diagnostics.findings import Finding, Status
from azureml_elastic.node.host.addresses import (
    Ports,
    advertised_address,
    format_address,
    is_loopback,
    listening_address,
)
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


_MIB = 1 << 20
_SAMPLE_BYTES = 4096
_WARN_BELOW = 2  # times the limit


_SHM_MIB = 1024
"""Size of ``/dev/shm`` below which DataLoader workers may run out of it."""

_OPEN_FILES = 1024


def check_folder(what: str, folder: Path, owner: str, limit_mib: int) -> Finding:
    """Write a small file, sync it, read it back, and determine the free space. On a dead mount this may never return.

    Args:
        folder: folder to check, created if missing.
        owner: unique part of the file's name, the same for all checks of a node so that leftovers are overwritten.
    """
    name, limit = f"disk: {what}", f"{limit_mib:,} MiB free, writable"
    started = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_and_read(folder / f".azureml-elastic-health-{owner}")
        space = os.statvfs(folder)
    except OSError as error:
        advice = f"Free space on the disk, or give another folder than {str(folder)!r} that this process may write to."
        return Finding(name, "fail", f"{type(error).__name__}: {error}", limit, advice)
    took = f"written and read in {1000 * (time.monotonic() - started):.0f} ms"
    if space.f_blocks == 0:  # some network mounts report no size
        return Finding(name, "ok", took, limit)
    free = space.f_bavail * space.f_frsize // _MIB
    advice = f"Free space on the disk of {str(folder)!r}."
    return Finding(name, _compare(free, limit_mib), f"{free:,} MiB free, {took}", limit, advice)


def check_memory(limit_mib: int) -> Finding:
    """Check the memory that is available to this process and its workers."""
    free, container = available_memory()
    whose = " by the container's limit" if container else ""
    value = f"{free // _MIB:,} MiB available{whose}"
    advice = "End other processes on this machine, or take a larger one."
    return Finding("memory", _compare(free // _MIB, limit_mib), value, f"{limit_mib:,} MiB available", advice)


def check_shared_memory(limit_mib: int = _SHM_MIB, folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - the kernel's name
    """Check the size of the memory file system through which DataLoader workers pass their batches."""
    name, limit = "shared memory", f"{limit_mib:,} MiB"
    advice = "Give the container more: ElasticResources(shm_size='16g'), or `docker run --shm-size`."
    try:
        space = os.statvfs(folder)
    except OSError as error:
        return Finding(name, "warn", f"{type(error).__name__}: {error}", limit, advice)
    size = space.f_blocks * space.f_frsize // _MIB
    return Finding(name, "warn" if size < limit_mib else "ok", f"{size:,} MiB", limit, advice)


def check_open_files(limit: int = _OPEN_FILES) -> Finding:
    """Check the limit of open files and sockets of a process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless, advice = soft == resource.RLIM_INFINITY, "Raise it with `ulimit -n` before the node starts."
    status: Status = "ok" if endless or soft >= limit else "warn"
    return Finding("open files", status, "unlimited" if endless else f"{soft:,}", f"{limit:,}", advice)


def _write_and_read(path: Path) -> None:
    sample = os.urandom(_SAMPLE_BYTES)
    # Without following links: other users can write to the temporary folder.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(sample)
            stream.flush()
            os.fsync(stream)
        if path.read_bytes() != sample:
            raise OSError(f"what was written to {str(path)!r} was read back differently")
    finally:
        path.unlink(missing_ok=True)


def _compare(found: int, limit: int) -> Status:
    if found < limit:
        return "fail"
    return "warn" if found < _WARN_BELOW * limit else "ok"


_PACKAGES = {"azure.data.tables": "azure-data-tables", "azure.identity": "azure-identity", "psutil": "psutil"}
_TORCH = (2, 6)


def check_packages() -> Iterator[Finding]:
    """Check whether the packages of a node are installed, without importing them."""
    missing = [package for module, package in _PACKAGES.items() if not _is_installed(module)]
    if missing:
        advice = "pip install 'azureml-elastic[node]'"
        yield Finding("packages", "fail", f"not installed: {', '.join(missing)}", "", advice)
    else:
        yield Finding("packages", "ok", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES.values()))
    wanted = ".".join(map(str, _TORCH))
    python = ".".join(map(str, sys.version_info[:3]))
    if not _is_installed("torch"):
        advice = "Nodes need it; the machine that submits does not. pip install 'azureml-elastic[node]'"
        yield Finding("torch", "warn", f"not installed in Python {python}", f"{wanted} or newer", advice)
        return
    version = _version("torch")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers and numbers < _TORCH:
        yield Finding("torch", "fail", version, f"{wanted} or newer", f"Use an environment with torch {wanted}.")
    else:
        yield Finding("torch", "ok", f"{version} in Python {python}")


def check_machine(rendezvous: TableRendezvous, environment: NodeEnvironment) -> Iterator[Finding]:
    """Determine the address at which peers reach this machine, and listen there as a node does."""
    try:
        address = advertised_address(rendezvous, environment)
    except UsageError as error:
        yield Finding("address", "fail", str(error))
        return
    interface = f" of {address.interface}" if address.interface else ""
    only = ", for nodes of this machine only" if is_loopback(address.host) else ""
    yield Finding("address", "ok", f"{address.host}{interface}{only}")
    yield _check_ports(rendezvous, address.host)
    if sys.platform == "linux":
        yield check_shared_memory()


def _check_ports(rendezvous: TableRendezvous, host: str) -> Finding:
    ports = Ports(rendezvous.port_range)
    among = "any free ports" if rendezvous.port_range is None else "{}-{}".format(*rendezvous.port_range)
    with contextlib.ExitStack() as stack:
        taken = []
        try:
            for _ in range(PORTS_OF_A_NODE):
                listener = stack.enter_context(ports.listen(listening_address(host), 5))
                taken.append(int(listener.getsockname()[1]))
        except (OSError, UsageError) as error:
            return Finding("ports", "fail", str(error), among)
        reached = check_hub(host, taken[0])
    if reached.status != "ok":
        return Finding("ports", reached.status, reached.value, among, reached.advice)
    return Finding("ports", "ok", f"{', '.join(map(str, taken))} ({among})")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"
