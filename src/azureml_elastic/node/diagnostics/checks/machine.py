"""Checks of this machine: packages, address, ports, memory and files."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from azureml_elastic.config import TableRendezvous
from azureml_elastic.config.rendezvous import PORTS_OF_A_NODE
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.memory import available_memory
from azureml_elastic.node.diagnostics.checks.network import check_hub
from azureml_elastic.node.diagnostics.findings import Finding, Status
from azureml_elastic.node.host.addresses import Ports, advertised_address, is_loopback, listening_address

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
