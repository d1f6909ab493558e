"""Where the other nodes reach this one: as the job says, or the address on the way to the table."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from azureml_elastic.config import TableRendezvous
from azureml_elastic.config.environment import LOCAL_ADDRESS
from azureml_elastic.errors import MissingExtra, UsageError

__all__ = [
    "AdvertisedAddress",
    "IPAddress",
    "advertised_address",
    "format_address",
    "is_loopback",
    "listening_address",
    "local_address",
    "machine_interfaces",
    "select_address",
]

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_HTTPS = 443

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of documentation, which no machine has: the route to them is the default route."""


@dataclass(frozen=True)
class AdvertisedAddress:
    """Where the other nodes reach this one.

    Args:
        host: an address or a host name.
        interface: the network interface that has it, where the job or the environment named one or a range.
    """

    host: str
    interface: str | None = None


def advertised_address(rendezvous: TableRendezvous, environ: Mapping[str, str]) -> AdvertisedAddress:
    """Return where the other nodes reach this one.

    Args:
        rendezvous: rendezvous settings, with the optional ``advertise``.
        environ: environment of the node, whose ``AZUREML_ELASTIC_LOCAL_ADDRESS`` takes precedence.

    Raises:
        UsageError: this machine has no such interface, or no address in the range.
    """
    if own := environ.get(LOCAL_ADDRESS):
        with contextlib.suppress(ValueError):
            return AdvertisedAddress(str(ipaddress.ip_address(own)))
        interfaces = machine_interfaces()
        return (
            select_address(own, interfaces, LOCAL_ADDRESS)
            if own in interfaces or "/" in own
            else AdvertisedAddress(own)
        )
    if rendezvous.advertise is not None:
        return select_address(rendezvous.advertise, machine_interfaces(), "advertise")
    return AdvertisedAddress(local_address(rendezvous.endpoint))


def select_address(wanted: str, interfaces: Mapping[str, tuple[IPAddress, ...]], who: str) -> AdvertisedAddress:
    """Return the address that was asked for; of several an IPv4 one.

    Args:
        wanted: the name of an interface, a range of addresses, or an address, which need not be this machine's own:
            it may be that of a gateway that leads here.
        interfaces: network interfaces of this machine, with their addresses.
        who: name of the setting, for the error message.

    Raises:
        UsageError: there is no such interface, or no address in the range.
    """
    if wanted in interfaces:
        found = [(address, wanted) for address in interfaces[wanted]]
        problem = f"the interface {wanted!r} has no address"
    elif "/" in wanted:
        network = ipaddress.ip_network(wanted, strict=False)
        every = [(address, name) for name, addresses in interfaces.items() for address in addresses]
        found = [(address, name) for address, name in every if address in network]
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
        f"{who}={wanted!r}: {problem}. There are: {there or 'none'}. Name one of these interfaces, a range such as "
        "10.0.0.0/16 that holds one of the addresses, or an address."
    )


def machine_interfaces() -> dict[str, tuple[IPAddress, ...]]:
    """Return this machine's network interfaces that are up, by name, each with the addresses that others may use."""
    try:
        import psutil
    except ImportError as error:
        raise MissingExtra("psutil", "node") from error
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces: dict[str, tuple[IPAddress, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = []
        for entry in entries:
            if name in up and entry.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(entry.address.partition("%")[0])
                if not address.is_link_local:
                    addresses.append(address)
        interfaces[name] = tuple(addresses)
    return interfaces


def local_address(endpoint: str | None) -> str:
    """Return this machine's address on the way to the table: the other nodes come the same way.

    A table on this machine (an SQLite file or an emulator) is shared by processes of this machine only, so that the
    loopback address serves. Where the table's host has no address, as behind a proxy, the way to everywhere serves.

    Args:
        endpoint: endpoint of the rendezvous.
    """
    parts = urlsplit(endpoint) if endpoint else None
    target = ""
    if parts is not None and parts.scheme in ("http", "https"):
        target = parts.hostname or ""
        if is_loopback(target):
            return "127.0.0.1"
    elif endpoint:
        return "127.0.0.1"
    for host in (target, *_ELSEWHERE):
        for family in (socket.AF_INET, socket.AF_INET6):
            source = _source(host, family) if host else None
            if source is not None:
                return source
    for addresses in machine_interfaces().values():
        for own in addresses:
            if not own.is_loopback:
                return str(own)
    return socket.getfqdn()


def listening_address(host: str) -> str:
    """Return the address to listen on for those who come to this host: the loopback one, or all of its family."""
    if is_loopback(host):
        return "::1" if host == "::1" else "127.0.0.1" if host == "localhost" else host
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - the others come from other machines


def is_loopback(host: str) -> bool:
    """Return whether an address or name means the machine that uses it."""
    return host in ("localhost", "::1") or host.startswith("127.")


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _source(host: str, family: int) -> str | None:
    """Return this machine's address on the way to a host, ``None`` where there is no way, or none that leaves it."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _HTTPS))  # datagram sockets send nothing here; the kernel picks the route
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    return None if own.is_loopback or own.is_link_local or own.is_unspecified else str(own)
