"""What the kernel tells about a process of another owner: its state, its signals and its descendants.

Only files of ``/proc`` are read that answer at once whatever state the process is in. ``cmdline``, ``maps`` and the
like wait for its memory map, which a process that hangs may hold for ever.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_MEANINGS = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a file system, which no signal interrupts",
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "I": "idle",
}


@dataclass(frozen=True)
class ProcessState:
    """One look at a process.

    Args:
        name: the process's name, which it may have set itself.
        letter: its main thread's state, as ``ps`` shows it.
        waits_in: the kernel function that the main thread sleeps in, empty where the kernel does not tell.
        caught: mask of the signals that it has handlers for; bit ``n - 1`` is signal ``n``.
        pending: mask of the signals sent to it that no thread has taken yet.
    """

    name: str
    letter: str
    waits_in: str
    threads: int
    caught: int
    pending: int

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for the signal."""
        return bool(self.caught >> (number - 1) & 1)

    def awaits(self, number: int) -> bool:
        """Whether the signal was sent, but not taken yet."""
        return bool(self.pending >> (number - 1) & 1)

    @property
    def ended(self) -> bool:
        """Whether only the entry in the process table is left."""
        return self.letter in "ZX"

    @property
    def stopped(self) -> bool:
        """Whether it takes no signal until it is continued."""
        return self.letter in "Tt"

    def __str__(self) -> str:
        where = f" in {self.waits_in}" if self.waits_in else ""
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"{self.name} is {_MEANINGS.get(self.letter, self.letter)} ({self.letter}){where}{threads}"


def read_state(pid: int) -> ProcessState | None:
    """Return the state of a process, ``None`` when there is none of that id."""
    fields = read_fields(Path(f"/proc/{pid}/status"))
    if "State" not in fields:
        return None
    waits_in = ""
    with contextlib.suppress(OSError):
        waits_in = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip("0\n ")
    return ProcessState(
        name=fields.get("Name", "?"),
        letter=fields["State"][:1],
        waits_in=waits_in,
        threads=int(fields.get("Threads", "1")),
        caught=int(fields.get("SigCgt", "0"), 16),
        pending=int(fields.get("SigPnd", "0"), 16) | int(fields.get("ShdPnd", "0"), 16),
    )


def threads_that_block(pid: int, number: int) -> frozenset[int]:
    """Return the threads that block a signal now; a thread does so, too, while it runs the handler."""
    found = set()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            mask = read_fields(thread / "status").get("SigBlk", "0")
            if int(mask, 16) >> (number - 1) & 1:
                found.add(int(thread.name))
    return frozenset(found)


def has_open(pid: int, path: Path) -> bool:
    """Tell whether a process has the file open. The path is compared as text, so that no file system is asked."""
    wanted = str(path)
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor) == wanted:  # noqa: PTH115 - Path would normalise what the kernel says
                    return True
    return False


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below one, the oldest first."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def read_fields(path: Path) -> dict[str, str]:
    """Return a status file's fields; none when the process or thread is gone."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
