"""CPU seconds of this process and of all that it has started, killed processes included.

Where control groups may be made, one is, and the kernel counts. Elsewhere processes are looked at while they live: what
one has used that was killed is missing unless its parent has waited for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

TICKS = os.sysconf("SC_CLK_TCK")


def has_ended(pid: int) -> bool:
    """Return whether a process is no more, or only its exit code is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


class Process(NamedTuple):
    """A line of ``/proc/PID/stat``."""

    pid: int
    parent: int
    state: str
    began: int
    """Clock tick at which it started: with the id it names a process for good."""
    seconds: float
    """Of CPU, with those of children that it has waited for."""


def running_processes() -> list[Process]:
    """Return all processes of the machine, parents before their children."""
    found = []
    with contextlib.suppress(OSError):  # a test has taken all file descriptors
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            with contextlib.suppress(OSError):  # it has ended
                # The name is in parentheses and may hold anything.
                fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
                seconds = sum(map(int, fields[11:15])) / TICKS
                found.append(Process(pid, int(fields[1]), fields[0], int(fields[19]), seconds))
    return sorted(found, key=lambda process: process.began)


def descendants() -> list[Process]:
    """Return the processes below this one."""
    below, found = {os.getpid()}, []
    for process in running_processes():
        if process.parent in below:
            below.add(process.pid)
            found.append(process)
    return found


@dataclass
class Group:
    """A control group, in which this process is and all that it starts will be."""

    folder: Path
    usage: str
    """The file with the CPU time."""

    kind = "by a control group"

    def __post_init__(self) -> None:
        """Make the group and go there."""
        self.folder.mkdir()
        try:
            # Kept open: some tests leave this process no descriptor.
            self._file = os.open(self.folder / self.usage, os.O_RDONLY)
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self.folder.rmdir()
            raise

    def seconds(self) -> float:
        """Return the CPU seconds since this process is in the group."""
        text = os.pread(self._file, 1000, 0).decode()
        if self.usage == "cpu.stat":  # "usage_usec 1234", then others
            return int(text.split()[1]) / 1e6
        return int(text) / 1e9

    def kill_others(self) -> None:
        """Kill all processes of the group but this one.

        A fork that is left keeps the pipe of a worker of xdist open, and the process that it reports to waits for the
        pipe's end.
        """
        self._kill(self.folder)

    def kill_left(self) -> None:
        """Kill what is left in the groups of workers of xdist that have ended without doing so themselves."""
        with contextlib.suppress(OSError):
            for group in self.folder.iterdir():
                pid = group.name.rpartition("-")[2]
                if pid.isdigit() and has_ended(int(pid)):
                    self._kill(group)

    @staticmethod
    def _kill(group: Path) -> None:
        with contextlib.suppress(OSError):
            for pid in map(int, (group / "cgroup.procs").read_text().split()):
                if pid != os.getpid():
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Go back to the group above with all processes that are left, and remove this one."""
        os.close(self._file)
        groups = [*(path for path in self.folder.iterdir() if path.is_dir()), self.folder]
        for group in groups:  # those below are left by workers of xdist that have crashed
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self.folder.parent / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                group.rmdir()


class Sampler:
    """Adds up what the processes below this one have used that run, or that their parents have waited for."""

    kind = "at least, since no control group can be made here"

    def seconds(self) -> float:
        """Return the CPU seconds so far."""
        return sum(os.times()[:4]) + sum(process.seconds for process in descendants())

    def kill_others(self) -> None:
        """Kill all processes below this one."""
        for process in descendants():
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)

    def kill_left(self) -> None:
        """Nothing tells whose the processes of a worker were that has ended."""

    def close(self) -> None:
        """Nothing is set up."""


Meter: TypeAlias = Group | Sampler


def open_meter(name: str) -> Meter:
    """Return the best meter that there is here; a process has one.

    Args:
        name: the name of the group, unique among those of this process's own group.
    """
    for folder, usage in _groups():
        with contextlib.suppress(OSError):
            return Group(folder / name, usage)
    return Sampler()


def _groups() -> Iterator[tuple[Path, str]]:
    """Yield the folders of this process's control groups that count CPU time."""
    listed = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        for number, controllers, path in listed:
            if kind == "cgroup" and "cpuacct" in controllers.split(",") and "cpuacct" in options.split(","):
                usage = "cpuacct.usage"
            elif kind == "cgroup2" and number == "0":
                usage = "cpu.stat"
            else:
                continue
            with contextlib.suppress(ValueError):  # mounted from a group that this process is not in
                yield Path(mounted) / Path(path).relative_to(root), usage
