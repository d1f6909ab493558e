"""The stacks of all workers of a node, and of their children, within a few seconds and from whatever state they are in.

Three ways, the best one first:

1. A worker with a session has a handler that writes its stacks into a file (see :mod:`azureml_elastic.ipc.stack_file`)
   when a signal comes. That also works for processes that it has forked. The signal goes only to a process that has
   the file open and catches the signal, since any other would die of it.
2. ``py-spy``, where it is installed beside this interpreter or on the path, reads the stacks of any Python process from
   outside, if the system allows that.
3. What the kernel says: the state, what the process waits for, and its stack in the kernel where that may be read.

The handler is over when the signal is no longer pending and no thread blocks it that had not blocked it before: the
kernel blocks a signal while its handler runs.

**What the kernel tells about a process of another owner: its state, its signals and its descendants.** Only files of
``/proc`` are read that answer at once whatever state the process is in. ``cmdline``, ``maps`` and the like wait for its
memory map, which a process that hangs may hold for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from azureml_elastic.ipc.stack_file import StackFile, stack_files

__all__ = [
    "ProcessStacks",
    "ProcessState",
    "Worker",
    "collect",
    "descendants",
    "has_open",
    "is_python",
    "kernel_stack",
    "main_thread_first",
    "py_spy",
    "read_state",
    "threads_that_block",
]

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
        threads: how many it has.
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
    fields = _fields(Path(f"/proc/{pid}/status"))
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
            mask = _fields(thread / "status").get("SigBlk", "0")
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


def is_python(pid: int) -> bool:
    """Tell by its executable whether a process runs Python."""
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python")  # noqa: PTH115 - as above
    except OSError:
        return False


def kernel_stack(pid: int) -> str:
    """Return where the main thread is in the kernel, innermost first; empty where only root may see that."""
    try:
        text = Path(f"/proc/{pid}/stack").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return "\n".join(line.partition("] ")[2].partition("+")[0] for line in text.splitlines())


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below one, the oldest first."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _fields(path: Path) -> dict[str, str]:
    """Return a status file's fields; none when the process or thread is gone."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


_POLL_SECONDS = 0.02
_SILENT_SECONDS = 0.3
"""A handler that ran and wrote nothing for so long will not write."""

_SIGNAL_SHARE = 0.6
"""Part of the time for the first way, so that some is left for the second."""

_MOST_CHILDREN = 16
_LARGEST_READ = 4 * 1024 * 1024
_LARGEST_TEXT = 64 * 1024

_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+|\d+).*:.*$", re.MULTILINE)


@dataclass(frozen=True)
class Worker:
    """A process that the agent has started.

    Args:
        local_rank: rank on this node.
        rank: rank in the round.
        pid: process id.
    """

    local_rank: int
    rank: int
    pid: int


@dataclass(frozen=True)
class ProcessStacks:
    """What could be learnt of one process.

    Args:
        name: display name: a rank, or a child of one.
        local_rank: local rank of the worker that it is or descends from.
        pid: process id.
        state: the kernel's description of its state.
        text: the stacks, innermost call first, the main thread before the others; empty where there are none.
        remarks: what did not go well.
    """

    name: str
    local_rank: int
    pid: int
    state: str
    text: str
    remarks: tuple[str, ...] = ()


def collect(folder: Path, workers: Mapping[int, Worker], *, seconds: float = 2.5) -> list[ProcessStacks]:
    """Collect the stacks of a node's workers and of their children.

    Args:
        folder: where the workers' sessions have made their files.
        workers: the processes that the agent has started, by local rank. Where a session is in another process, as
            below a shell script, that one counts.
        seconds: timeout, after which the stacks collected so far are returned.

    Returns:
        A list in the order of local ranks, each worker followed by its children.
    """
    deadline = time.monotonic() + seconds
    folder = folder.resolve()
    jobs: dict[int, tuple[Worker, StackFile | None]] = {rank: (worker, None) for rank, worker in workers.items()}
    for path, entry in stack_files(folder):
        if has_open(entry.pid, path):
            jobs[entry.local_rank] = (Worker(entry.local_rank, entry.rank, entry.pid), entry)
    found: dict[int, list[ProcessStacks]] = {rank: [] for rank in jobs}

    def work(worker: Worker, entry: StackFile | None) -> None:
        # Appended one by one: when time is over, what is there is taken.
        seen = found[worker.local_rank]
        seen.append(_process(f"rank {worker.rank}", worker, worker.pid, entry, folder, deadline))
        children = descendants(worker.pid)
        for pid in children[:_MOST_CHILDREN]:
            seen.append(_process(f"child of rank {worker.rank}", worker, pid, entry, folder, deadline))
        if len(children) > _MOST_CHILDREN:
            rest = children[_MOST_CHILDREN:]
            seen.append(
                ProcessStacks(f"{len(rest)} more children of rank {worker.rank}", worker.local_rank, rest[0], "", "")
            )

    # Nothing here should block for long; should something do so all the same, the agent must not.
    threads = [threading.Thread(target=work, args=job, name="stacks", daemon=True) for job in jobs.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()) + _POLL_SECONDS)
    for local_rank, (worker, _) in jobs.items():
        if not found[local_rank]:
            remark = f"nothing could be learnt within {seconds:g} s"
            found[local_rank].append(
                ProcessStacks(f"rank {worker.rank}", local_rank, worker.pid, _state(worker.pid), "", (remark,))
            )
    return list(itertools.chain.from_iterable(list(found[local_rank]) for local_rank in sorted(found)))


def main_thread_first(text: str, main_thread: int | None = None) -> str:
    """Return a dump with the main thread's stack before all others.

    Args:
        text: dump of :mod:`faulthandler` or ``py-spy``.
        main_thread: number of the main thread in the dump; ``None`` for a dump that names it ``MainThread``.
    """
    heads = list(_THREAD.finditer(text))
    bounds = [head.start() for head in heads] + [len(text)]
    main: list[str] = []
    others: list[str] = []
    for head, (start, end) in zip(heads, itertools.pairwise(bounds), strict=True):
        block = text[start:end].strip("\n")
        if main_thread is None:
            (main if '"MainThread"' in head.group() else others).append(block)
        elif int(head.group("id"), 16) == main_thread:
            main.append(re.sub(r"^(Current thread|Thread)", "Main thread", block))
        else:
            others.append(re.sub(r"^Current thread", "Thread", block))
    preface = text[: bounds[0]].strip("\n")
    return "\n\n".join(part for part in (preface, *main, *others) if part)


def py_spy() -> str | None:
    """Return the path of ``py-spy``, ``None`` where it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _process(
    name: str, worker: Worker, pid: int, entry: StackFile | None, folder: Path, deadline: float
) -> ProcessStacks:
    """Learn about one process."""
    remarks: list[str] = []
    text = ""
    state = _state(pid)
    if entry is not None:
        now = time.monotonic()
        text, remark = _by_signal(pid, entry, entry.path(folder), now + max(0.0, deadline - now) * _SIGNAL_SHARE)
        text = main_thread_first(text, entry.main_thread)
        remarks.append(remark)
    if not text and is_python(pid):
        text, remark = _by_py_spy(pid, deadline)
        text = main_thread_first(text)
        remarks.append(remark)
    if not text and (inside := kernel_stack(pid)):
        text = f"In the kernel (innermost first):\n{inside}"
    return ProcessStacks(
        name, worker.local_rank, pid, state, _shortened(text, _LARGEST_TEXT), tuple(filter(None, remarks))
    )


def _by_signal(pid: int, entry: StackFile, path: Path, deadline: float) -> tuple[str, str]:
    """Have the process write its stacks.

    Returns:
        What it wrote, and what did not go well.
    """
    before = read_state(pid)
    if before is None or before.ended:
        return "", "it has ended"
    if not has_open(pid, path) or not before.catches(entry.signal):
        own = pid == entry.pid
        return "", f"it no longer answers signal {entry.signal}" if own else ""
    try:
        offset = path.stat().st_size
        blocking = threads_that_block(pid, entry.signal)
        os.kill(pid, entry.signal)
    except OSError as error:
        return "", f"it could not be asked: {error}"
    size, remark, sent = offset, "", time.monotonic()
    while True:
        time.sleep(_POLL_SECONDS)
        state = read_state(pid)
        if state is None or state.ended:
            remark = "it ended meanwhile"
            break
        if state.awaits(entry.signal):
            if state.stopped:
                remark = "it takes no signal while it is stopped"
                break
        elif threads_that_block(pid, entry.signal) <= blocking:
            last, size = size, _size(path)
            if size == last > offset:
                break
            if size == offset and time.monotonic() - sent > _SILENT_SECONDS:
                remark = f"it took signal {entry.signal}, but wrote nothing"
                break
        if time.monotonic() > deadline:
            remark = f"its answer was not complete after {time.monotonic() - sent:.1f} s"
            break
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_LARGEST_READ).decode("ascii", errors="replace").strip("\n"), remark
    except OSError as error:
        return "", f"its answer cannot be read: {error}"


def _by_py_spy(pid: int, deadline: float) -> tuple[str, str]:
    """Read the stacks from outside, without stopping the process.

    Returns:
        The stacks, and what did not go well.
    """
    program = py_spy()
    left = deadline - time.monotonic()
    if program is None or left <= 0:
        return "", "" if program is None else "no time was left for py-spy"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not answer within {left:.1f} s"
    except OSError as error:
        return "", f"py-spy could not be started: {error}"
    if result.returncode != 0:
        why = result.stderr.decode(errors="replace").strip().splitlines()
        return "", f"py-spy failed: {why[-1] if why else result.returncode}"
    return result.stdout[:_LARGEST_READ].decode(errors="replace").strip("\n"), ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _state(pid: int) -> str:
    state = read_state(pid)
    return "gone" if state is None else str(state)


def _shortened(text: str, largest: int) -> str:
    """Cut a text at a line's end; a note says how much is missing."""
    if len(text) <= largest:
        return text
    kept = text[:largest].rpartition("\n")[0]
    return f"{kept}\n  ({len(text) - len(kept)} more characters)"
