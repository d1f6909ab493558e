"""The stacks of all workers of a node, and of the processes that they have forked: asked for by a signal, and as text.

A worker with a session has a handler that writes its stacks into a file (see :mod:`azureml_elastic.ipc.stack_file`)
when a signal comes. That also works for processes that it has forked. The signal goes only to a process that has the
file open and catches the signal, since any other would die of it. Of all other processes there is only their state.

The handler is over when the signal is no longer pending and no thread blocks it that had not blocked it before: the
kernel blocks a signal while its handler runs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from azureml_elastic.ipc.stack_file import SUFFIX, StackFile, stack_files
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.hangs.process_state import descendants, has_open, read_state, threads_that_block
from azureml_elastic.node.hangs.waiting import whereabouts
from azureml_elastic.private_folder import make_private

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_SILENT_SECONDS = 0.3
"""A handler that ran and wrote nothing for so long will not write."""

_MOST_CHILDREN = 16
_LARGEST_READ = 4 * 1024 * 1024
_LARGEST_TEXT = 64 * 1024
_LOGGED_PER_PROCESS = 16 * 1024
_LOGGED = 192 * 1024

_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+).*:.*$", re.MULTILINE)
_ANY_THREAD = re.compile(r"^(?:Current thread|Thread)")


@dataclass(frozen=True)
class Worker:
    """A process that the agent has started."""

    local_rank: int
    rank: int
    pid: int


@dataclass(frozen=True)
class ProcessStacks:
    """What could be learnt of one process.

    Args:
        name: display name: a rank, or a child of one.
        local_rank: local rank of the worker that it is or descends from.
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

    # One thread for each worker: one that does not answer is waited for until the deadline, which the others share.
    # Nothing here should block for longer; should something do so all the same, the agent must not.
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


def stack_folders(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the folders in which processes have their files for stacks open."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    path = Path(os.readlink(descriptor))  # noqa: PTH115 - as above
                    if path.suffix == SUFFIX and StackFile.read(path) is not None:
                        found.add(path.parent)
    return found


def main_thread_first(text: str, main_thread: int) -> str:
    """Return a dump of :mod:`faulthandler` with the stack of the thread of this identifier before all others."""
    heads = list(_THREAD.finditer(text))
    bounds = [head.start() for head in heads] + [len(text)]
    main: list[str] = []
    others: list[str] = []
    for head, (start, end) in zip(heads, itertools.pairwise(bounds), strict=True):
        block = text[start:end].strip("\n")
        if int(head.group("id"), 16) == main_thread:
            main.append(_ANY_THREAD.sub("Main thread", block))
        else:
            others.append(_ANY_THREAD.sub("Thread", block))
    preface = text[: bounds[0]].strip("\n")
    return "\n\n".join(part for part in (preface, *main, *others) if part)


def _process(
    name: str, worker: Worker, pid: int, entry: StackFile | None, folder: Path, deadline: float
) -> ProcessStacks:
    """Learn about one process, the worker itself or a descendant of it."""
    text = remark = ""
    state = _state(pid)
    if entry is not None:
        text, remark = _by_signal(pid, entry, entry.path(folder), deadline)
        text = _shortened(main_thread_first(text, entry.main_thread), _LARGEST_TEXT)
    return ProcessStacks(name, worker.local_rank, pid, state, text, (remark,) if remark else ())


def _by_signal(pid: int, entry: StackFile, path: Path, deadline: float) -> tuple[str, str]:
    """Have the process write its stacks.

    Returns:
        What it wrote, and what did not go well.
    """
    before = read_state(pid)
    if before is None or before.ended:
        return "", "it has ended"
    # Asked last thing before the signal: the program may have closed the descriptor or replaced the handler since it
    # registered, and a forked child may have executed another program. The default action of the signal is to die.
    if not has_open(pid, path) or not before.catches(entry.signal):
        own = pid == entry.pid
        return "", f"it no longer answers signal {entry.signal}" if own else ""
    try:
        offset = path.stat().st_size
        blocking = threads_that_block(pid, entry.signal)
        os.kill(pid, entry.signal)
    except OSError as error:
        return "", f"it could not be asked: {error}"
    # No lock and no answer over the channel: what hangs may hold the GIL, and then only its C handler runs.
    size, remark, sent = offset, "", time.monotonic()
    while True:
        time.sleep(_POLL_SECONDS)
        state = read_state(pid)
        if state is None or state.ended:
            remark = "it ended meanwhile"
            break
        # Pending first: a signal that nobody has taken yet says nothing about its handler. One that is taken is
        # blocked in the thread that handles it, so the answer is complete when no further thread blocks it and the
        # file has stopped to grow: the kernel's two files are not read in one instant.
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _state(pid: int) -> str:
    state = read_state(pid)
    return "gone" if state is None else str(state)


def _shortened(text: str, largest: int | None) -> str:
    """Cut a text at a line's end; a note says how much is missing."""
    if largest is None or len(text) <= largest:
        return text
    kept = text[:largest].rpartition("\n")[0]
    return f"{kept}\n  ({len(text) - len(kept)} more characters)\n"


class StackReporter:
    """Collects and writes the stacks of one node on a thread of its own, so that no worker can hold up the agent.

    Args:
        folder: where the workers' sessions make their files: the one of the agent's socket.
        reports: the folder for the written stacks, ``stacks`` in the run's folder. Each node writes
            ``round-<number>.<node>.txt`` there.
        queue: queue of the agent, which is woken when it is done.
    """

    def __init__(self, folder: Path, reports: Path, node: str, queue: EventQueue, *, seconds: float = 2.5) -> None:
        self._folder = folder
        self._reports = reports
        self._node = node
        self._queue = queue
        self._seconds = seconds
        self._idle = threading.Event()
        self._idle.set()

    @property
    def done(self) -> bool:
        """Whether nothing is being collected now."""
        return self._idle.is_set()

    def start(self, why: str, round_number: int, workers: Iterable[Worker], steps: Mapping[int, int]) -> None:
        """Begin; while an earlier collection goes on nothing happens.

        Args:
            steps: the last step that each local rank has completed, where it has completed one.
        """
        if not self.done:
            return
        arguments = (f"{self._node}, round {round_number}: {why}", round_number, list(workers), dict(steps))
        self._idle.clear()
        threading.Thread(target=self._run, args=arguments, name="stack-dump", daemon=True).start()

    def _run(self, title: str, round_number: int, workers: list[Worker], steps: Mapping[int, int]) -> None:
        try:
            by_rank = {worker.local_rank: worker for worker in workers}
            found = collect(self._folder, by_rank, seconds=self._seconds)
            path = self._reports / f"round-{round_number}.{self._node}.txt"
            where = f"All of it is in {path}." if self._write(path, render(title, found, steps)) else ""
            limits = {"largest": _LOGGED, "largest_process": _LOGGED_PER_PROCESS}
            _LOG.error("%s%s", render(title, found, steps, **limits), where)
        except Exception:  # noqa: BLE001 - the round shall be restarted all the same
            _LOG.exception("The stacks of this node's workers could not be collected.")
        finally:
            self._idle.set()
            self._queue.wake()

    def _write(self, path: Path, text: str) -> bool:
        try:
            make_private(path.parent)
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            _LOG.warning("The stacks cannot be written to %s: %s", path, error)
            return False
        return True


def waiting_lines(found: Iterable[ProcessStacks]) -> list[str]:
    """Return a line for each worker that says where it waits, as far as its stacks tell."""
    places = ((one.name, whereabouts(one.text)) for one in found if one.name.startswith("rank "))
    return [f"{name} {place}" for name, place in places if place]


def render(
    title: str,
    found: Sequence[ProcessStacks],
    steps: Mapping[int, int],
    *,
    largest: int | None = None,
    largest_process: int | None = None,
) -> str:
    """Return the stacks as a text for people.

    Args:
        found: the processes; neighbours of the same name and the same stacks are written once.
        largest: characters of the text, ``None`` for all.
        largest_process: characters of one process's stacks, ``None`` for all.
    """
    parts = [f"===== Stacks of {title} =====\n"]
    if lines := waiting_lines(found):
        parts.append("\n" + "\n".join(lines) + "\n")
    for _, group in itertools.groupby(found, key=lambda one: (one.name, one.local_rank, one.text, one.remarks)):
        alike = list(group)
        first = alike[0]
        pids = ", ".join(str(one.pid) for one in alike)
        step = f", after step {steps[first.local_rank]}" if first.local_rank in steps else ""
        lines = [f"\n----- {first.name}, pid {pids}{step}: {first.state}"]
        lines.extend(f"({remark})" for remark in first.remarks)
        lines.append(_shortened(first.text or "(no stacks)", largest_process))
        parts.append("\n".join(lines) + "\n")
    parts.append(f"\n===== End of the stacks of {title.partition(':')[0]} =====\n")
    return _shortened("".join(parts), largest)
