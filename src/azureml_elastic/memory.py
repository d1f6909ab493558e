"""Available memory and out-of-memory kills of this container, from Linux control groups of both generations.

See https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from azureml_elastic.errors import needs_extra

_MOUNTS = Path("/sys/fs/cgroup")
_LISTING = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Limits of the first generation from this size on mean "unlimited"."""


class OomKillCounter:
    """Counter of processes of this container that the kernel killed because memory was exhausted.

    Without a readable counter no kill is reported.
    """

    def __init__(self, mounts: Path = _MOUNTS, listing: Path = _LISTING) -> None:
        self._groups = _memory_groups(mounts, listing)
        self._seen = self._count()

    def more(self) -> bool:
        """Return whether there were kills since the last call, or since construction."""
        count, before = self._count(), self._seen
        self._seen = count
        return count is not None and before is not None and count > before

    def _count(self) -> int | None:
        for folder in self._groups:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    return _counters(folder / name)["oom_kill"]
        return None


def available_memory(mounts: Path = _MOUNTS, listing: Path = _LISTING) -> tuple[int, bool]:
    """Return the available bytes, and whether a container's limit determines them rather than the machine's memory.

    The limits of all enclosing groups apply. Inactive file caches, which the kernel drops first, count as available.

    Raises:
        MissingExtra: psutil is not installed.
    """
    with needs_extra("psutil", "node"):
        import psutil
    machine: int = psutil.virtual_memory().available
    headroom = [room for folder in _memory_groups(mounts, listing) if (room := _headroom(folder)) is not None]
    container = min(headroom, default=machine)
    return min(machine, container), container < machine


def _memory_groups(mounts: Path, listing: Path) -> list[Path]:
    """Return the folders of this process's memory groups, each followed by the groups that enclose it."""
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = mounts
        elif "memory" in controllers.split(","):
            top = mounts / "memory"
        else:
            continue
        # Inside a container the path may be that of the host, of which only the end, or nothing, is mounted.
        inner = top / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return folders


def _headroom(folder: Path) -> int | None:
    """Return the bytes that a group may still allocate, ``None`` without a limit."""
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # the file is missing, or contains "max"
            limit = int((folder / limit_file).read_text())
            usage = int((folder / usage_file).read_text())
            if limit < _UNLIMITED:
                return max(0, limit - max(0, usage - _counters(folder / "memory.stat").get(cache, 0)))
    return None


def _counters(file: Path) -> dict[str, int]:
    """Read a file of lines ``<name> <number>``."""
    return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}
