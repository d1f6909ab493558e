"""Locks of torch's compiled extensions that a killed process has left: the next one would wait for them forever.

torch compiles an extension in a folder with the file ``lock``, which its process holds open until the extension is
complete, and then removes (``torch/utils/file_baton.py``). DeepSpeed compiles its operators so when it first uses them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from azureml_elastic.environment.node import NodeEnvironment

_LOG = logging.getLogger(__name__)

_REMOTE = ("nfs", "cifs", "smb", "fuse", "lustre", "9p", "ceph", "gpfs", "beegfs", "wekafs")
"""Beginnings of the names of file systems whose files a process of another machine may hold open."""

_LONG_ENOUGH_S = 0.2
"""Seconds for a process that has closed its lock to remove it."""


def remove_stale_locks(environment: NodeEnvironment) -> list[Path]:
    """Remove the locks that no process of this machine holds, on file systems of its own; return their paths."""
    found = [lock for lock in _locks(environment) if _is_local(lock)]
    stale = _not_open(found)
    if stale:
        time.sleep(_LONG_ENOUGH_S)
        # A process closes its lock before it removes it: only what stays unlocked and there for a while was left.
        stale = [lock for lock in _not_open(stale) if lock.exists()]
    for lock in stale:
        with contextlib.suppress(OSError):
            lock.unlink()
            _LOG.warning("Removed %s, which a process that was killed has left: torch would wait for it forever.", lock)
    return stale


def _locks(environment: NodeEnvironment) -> list[Path]:
    own = environment.torch_extensions
    root, pattern = (own, "*/lock") if own else (environment.cache / "torch_extensions", "*/*/lock")
    return list(root.glob(pattern))


def _is_local(path: Path) -> bool:
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
    return not kind.startswith(_REMOTE)


def _not_open(locks: Iterable[Path]) -> list[Path]:
    wanted = {lock.resolve(): lock for lock in locks}
    if not wanted:
        return []
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            wanted.pop(descriptor.readlink(), None)
    return list(wanted.values())
