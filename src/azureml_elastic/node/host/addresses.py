"""The address at which the other nodes reach this one, and the ports on which it listens for them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from azureml_elastic.config import TableRendezvous
from azureml_elastic.config.rendezvous import PORTS_OF_A_NODE
from azureml_elastic.environment.names import LOCAL_ADDRESS
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import MissingExtra, UsageError
from azureml_elastic.ipc import listen

_LOG = logging.getLogger(__name__)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_HTTPS = 443

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation: the route to them is the default route."""


@dataclass(frozen=True)
class AdvertisedAddress:
    """Address at which the other nodes reach this one.

    Args:
        interface: network interface with the address, if an interface or a range was configured.
    """

    host: str
    interface: str | None = None


def advertised_address(rendezvous: TableRendezvous, environment: NodeEnvironment) -> AdvertisedAddress:
    """Return the address at which the other nodes reach this one.

    Args:
        rendezvous: rendezvous settings, with the optional ``advertise``.
        environment: environment of the node, whose ``AZUREML_ELASTIC_LOCAL_ADDRESS`` takes precedence.

    Raises:
        UsageError: this machine has not the configured interface, or no address in the configured range.
    """
    if own := environment.address:
        with contextlib.suppress(ValueError):
            return AdvertisedAddress(str(ipaddress.ip_address(own)))
        interfaces = machine_interfaces()
        is_name = own not in interfaces and "/" not in own
        return AdvertisedAddress(own) if is_name else select_address(own, interfaces, LOCAL_ADDRESS)
    if rendezvous.advertise is not None:
        return select_address(rendezvous.advertise, machine_interfaces(), "advertise")
    return AdvertisedAddress(local_address(rendezvous.endpoint))


def select_address(wanted: str, interfaces: Mapping[str, tuple[IPAddress, ...]], setting: str) -> AdvertisedAddress:
    """Return the configured address; of several, the first IPv4 address.

    Args:
        wanted: name of an interface, range of addresses, or an address, also one of a gateway to this machine.
        interfaces: addresses of this machine by network interface.
        setting: name of the setting, for the error message.

    Raises:
        UsageError: there is no such interface, or no address in the range.
    """
    if wanted in interfaces:
        found = [(address, wanted) for address in interfaces[wanted]]
        problem = f"the interface {wanted!r} has no address"
    elif "/" in wanted:
        network = ipaddress.ip_network(wanted, strict=False)
        found = [(each, name) for name, addresses in interfaces.items() for each in addresses if each in network]
        problem = f"no address of this machine is in {network}"
    else:
        with contextlib.suppress(ValueError):
            return AdvertisedAddress(str(ipaddress.ip_address(wanted)))
        found, problem = [], f"this machine has no network interface {wanted!r}"
    for address, name in sorted(found, key=lambda each: each[0].version):
        return AdvertisedAddress(str(address), name)
    there = ", ".join(
        f"{name} ({', '.join(map(str, addresses)) or 'no address'})" for name, addresses in sorted(interfaces.items())
    )
    raise UsageError(
        f"{setting}={wanted!r}: {problem}. There are: {there or 'none'}. Name one of these interfaces, a range such as "
        "10.0.0.0/16 that holds one of the addresses, or an address."
    )


def machine_interfaces() -> dict[str, tuple[IPAddress, ...]]:
    """Return the addresses that other machines can use, by network interface; none for interfaces that are down."""
    try:
        import psutil
    except ImportError as error:
        raise MissingExtra("psutil", "node") from error
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces: dict[str, tuple[IPAddress, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        used = [each for each in entries if name in up and each.family in (socket.AF_INET, socket.AF_INET6)]
        # Of IPv6, psutil gives link-local addresses with their zone, as in fe80::1%eth0.
        addresses = (ipaddress.ip_address(each.address.partition("%")[0]) for each in used)
        interfaces[name] = tuple(address for address in addresses if not address.is_link_local)
    return interfaces


def local_address(endpoint: str | None) -> str:
    """Return this machine's source address on the route to the table, which the other nodes use, too.

    A table on this machine (an SQLite file or an emulator) is used by local processes only, so that the loopback
    address is returned. If the table's host cannot be resolved, as behind a proxy, the default route is used.
    """
    parts = urlsplit(endpoint) if endpoint else None
    target = ""
    if parts is not None and parts.scheme in ("http", "https"):
        target = parts.hostname or ""
        if is_loopback(target):
            return "127.0.0.1"
    elif endpoint:
        return "127.0.0.1"
    for host in filter(None, (target, *_ELSEWHERE)):
        for family in (socket.AF_INET, socket.AF_INET6):
            if source := _source(host, family):
                return source
    every = (own for addresses in machine_interfaces().values() for own in addresses if not own.is_loopback)
    return str(next(every, None) or socket.getfqdn())


def listening_address(host: str) -> str:
    """Return the address to listen on for connections to this host.

    That is the host's own address, so that nothing is reached over other interfaces. For a name, which may have other
    addresses elsewhere, and for the address of a gateway to this machine, it is all addresses.
    """
    if host == "localhost":
        return "127.0.0.1"
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    with contextlib.suppress(OSError, ValueError), socket.socket(family) as probe:
        probe.bind((str(ipaddress.ip_address(host)), 0))
        return host
    every = "::" if is_ipv6 else "0.0.0.0"  # noqa: S104 - for connections from other machines
    _LOG.info("Listening on all addresses, because %s is not an address of this machine.", host)
    return every


def interface_of(host: str, interfaces: Mapping[str, tuple[IPAddress, ...]]) -> str | None:
    """Return the network interface on which gloo and NCCL should listen, ``None`` where they must choose.

    Args:
        host: address at which the other nodes reach this one.
        interfaces: addresses of this machine by network interface.
    """
    with contextlib.suppress(ValueError):
        own = ipaddress.ip_address(host)
        found = [name for name, addresses in interfaces.items() if own in addresses]
        # They take the interface's first address: one of the other family may not be reachable.
        if len(found) == 1 and interfaces[found[0]][0].version == own.version:
            return found[0]
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or ``localhost``."""
    return host in ("localhost", "::1") or host.startswith("127.")


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _source(host: str, family: int) -> str | None:
    """Return this machine's address on the route to a host, ``None`` without a route to another machine."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _HTTPS))  # sends nothing for datagram sockets, but selects the route
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    return None if own.is_loopback or own.is_link_local or own.is_unspecified else str(own)


class Ports:
    """Allocator of listening sockets. Not thread-safe.

    Ports of a range are used in turn, so that a client with the port of an earlier round finds no listener there.
    Several nodes of one machine can share a range.

    Args:
        allowed: first and last port of the range; ``None`` for any free port.
    """

    def __init__(self, allowed: tuple[int, int] | None = None) -> None:
        self.allowed = allowed
        self._next = allowed[0] if allowed is not None else 0

    def listen(self, interface: str, backlog: int) -> socket.socket:
        """Return a socket that listens on a free port.

        Args:
            interface: address to listen on.
            backlog: maximum number of connections waiting to be accepted.

        Raises:
            UsageError: all ports of the range are taken.
            OSError: the interface is not an address of this machine.
        """
        if self.allowed is None:
            return listen((interface, 0), backlog=backlog)
        low, high = self.allowed
        count = high - low + 1
        for step in range(count):
            port = low + (self._next - low + step) % count
            try:
                listener = listen((interface, port), backlog=backlog)
            except OSError as error:
                # A port that only root may have counts as taken.
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                self._next = port + 1
                return listener
        raise UsageError(
            f"All {count} ports of port_range={low}-{high} are taken on {interface}. Each node on a machine needs "
            f"{PORTS_OF_A_NODE}. Free some, or give a larger port_range."
        )
