"""Checks of the installed packages, the advertised address, the ports and the shared memory."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from azureml_elastic.config import HealthPolicy, TableRendezvous
from azureml_elastic.config.rendezvous import PORTS_OF_A_NODE
from azureml_elastic.errors import UsageError
from azureml_elastic.node.diagnostics.checks.machine import check_shared_memory
from azureml_elastic.node.diagnostics.checks.network import check_hub
from azureml_elastic.node.diagnostics.findings import Finding
from azureml_elastic.node.host.addresses import advertised_address, is_loopback, listening_address
from azureml_elastic.node.host.ports import Ports

__all__ = ["check_machine", "check_packages"]

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


def check_machine(rendezvous: TableRendezvous, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Determine the address at which peers reach this machine, and listen there as a node does.

    Args:
        rendezvous: rendezvous settings with the address and the port range.
        environ: environment variables of the process.
    """
    try:
        address = advertised_address(rendezvous, environ)
    except UsageError as error:
        yield Finding("address", "fail", str(error))
        return
    interface = f" of {address.interface}" if address.interface else ""
    only = ", for nodes of this machine only" if is_loopback(address.host) else ""
    yield Finding("address", "ok", f"{address.host}{interface}{only}")
    yield _check_ports(rendezvous, address.host)
    if sys.platform == "linux":
        wanted = HealthPolicy().shm_mib
        assert wanted is not None, "the check is on by default"
        yield check_shared_memory(wanted)


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
