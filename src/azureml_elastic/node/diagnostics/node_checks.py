"""The health checks of a node, with the limits of its policy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from azureml_elastic.checkpoint.storage.locations import is_remote
from azureml_elastic.config import HealthPolicy
from azureml_elastic.node.diagnostics.checks.accelerator import check_ecc, check_gpus
from azureml_elastic.node.diagnostics.checks.machine import (
    check_folder,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from azureml_elastic.node.diagnostics.checks.network import check_clock, check_hub, check_peers
from azureml_elastic.node.diagnostics.findings import Check, Finding, Status
from azureml_elastic.node.failures.host_strikes import HostStrikes
from azureml_elastic.node.table import Table
from azureml_elastic.node.table.server_time import ServerClock

_Look = Callable[[], Finding | Sequence[Finding]]

_QUICK_SECONDS = 2.0  # for what involves only this machine and its peers
_MOUNT_FACTOR = 5.0  # a folder may be a mount, whose first access is slow
_GPU_SECONDS = 60.0  # of a process that imports torch and computes on each GPU
_KILL_SECONDS = 3.0  # in addition, if it has to be killed
_MEMORY_MIB = 512


def check_folders(run: Path, checkpoints: str | None) -> dict[str, Path]:
    """Return the folders that a node writes to, by purpose and without duplicates."""
    folders = {"run's folder": run, "temporary files": Path(tempfile.gettempdir())}
    if checkpoints is not None and not is_remote(checkpoints):
        folders["checkpoints"] = Path(checkpoints)
    names = {folder.absolute(): what for what, folder in reversed(folders.items())}
    return {what: folder.absolute() for what, folder in folders.items() if names[folder.absolute()] == what}


def node_checks(
    policy: HealthPolicy,
    *,
    node: str,
    owner: str | None = None,
    folders: Mapping[str, Path],
    gpus: int = 0,
    table: Table | None = None,
    clock: ServerClock | None = None,
    table_heartbeat_interval: timedelta = timedelta(seconds=5),
    hub: tuple[str, int] | None = None,
    strikes: HostStrikes | None = None,
    quick: float = _QUICK_SECONDS,
) -> list[Check]:
    """Return the checks of one node that the policy enables.

    Args:
        owner: unique part of the names of temporary files; ``None`` means the node's name.
        table: table of the run; without it neither the clock nor the peers are checked.
        hub: host and port at which the other nodes reach this one.
        strikes: strikes against this node's host, read in advance to speed up joining.
        quick: time limit in seconds of what involves only this machine and its peers; folders have five times as long.
    """
    mount = _MOUNT_FACTOR * quick
    checks: list[Check] = []

    def add(name: str, look: _Look, limit: float, late: Status, advice: str) -> None:
        checks.append(Check(name, look, limit, Finding(name, late, "", f"an answer within {limit:g} s", advice)))

    if policy.disk_mib is not None:
        for what, folder in folders.items():
            advice = f"Check whether the mount of {str(folder)!r} responds."
            write = partial(check_folder, what, folder, owner or node, policy.disk_mib)
            add(f"disk: {what}", write, mount, "fail", advice)
    add("memory", partial(check_memory, _MEMORY_MIB), quick, "warn", "")
    add("shared memory", check_shared_memory, quick, "warn", "")
    add("open files", check_open_files, quick, "warn", "")
    if hub is not None:
        add("own port", partial(check_hub, *hub), quick, "warn", "")
    if table is not None and clock is not None:
        advice = "The table is unavailable or slow; the node joins and waits for it."
        add("clock", partial(check_clock, clock), quick, "warn", advice)
        add("peers", partial(check_peers, table, clock, node, table_heartbeat_interval), quick, "warn", advice)
    if strikes is not None:
        add("strikes", partial(_check_strikes, strikes, policy.quarantine_strikes), quick, "warn", "")
    if gpus:
        until = _GPU_SECONDS + _KILL_SECONDS
        advice = "A process that uses the GPU cannot be killed; restart the machine."
        add("gpu", partial(check_gpus, gpus, _GPU_SECONDS), until, "fail", advice)
        add("gpu memory errors", partial(check_ecc, _GPU_SECONDS), until, "fail", advice)
    return checks


def _check_strikes(strikes: HostStrikes, quarantine: int | None) -> Finding:
    count = strikes.mine(fresh=True)
    value = f"{count} against {strikes.host}"
    limit = "any" if quarantine is None else f"fewer than {quarantine}"
    advice = "This host is quarantined: until its strikes decay, it is a member only if the minimum requires it."
    return Finding("strikes", "ok" if quarantine is None or count < quarantine else "warn", value, limit, advice)
