"""Commands as process trees that are observed from outside: CPU time, memory, and their end.

CPU time is that of a control group where this process may make one (cgroup v1 ``cpuacct`` or cgroup v2), so that it
includes every process that has ended, no matter which process has waited for it. Elsewhere it is summed over the living
processes and the children they have waited for, which misses orphans that have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Memory", "ProcessTree", "Trees", "accounting", "memory_of", "observed_trees"]

_MARKER = "BENCH_TREE"
_CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_TIMEOUT_S = 10.0
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Memory:
    """Memory of one process in MB.

    Args:
        rss: resident pages.
        pss: resident pages, shared ones divided by the number of processes that have them.
        uss: pages that no other process has.
    """

    rss: float
    pss: float
    uss: float


def memory_of(pid: int) -> Memory | None:
    """Return the memory of a process, ``None`` if it has ended."""
    try:
        found = psutil.Process(pid).memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return Memory(found.rss / 1e6, found.pss / 1e6, found.uss / 1e6)


class _CpuAccount:
    """A control group that counts CPU time; processes that are started in it stay in it.

    Args:
        folder: folder of the group.
        usage: function that returns the CPU seconds used in the group.
    """

    def __init__(self, folder: Path, usage: Callable[[Path], float]) -> None:
        self._folder = folder
        self._usage = usage
        folder.mkdir()
        self.processes = str(folder / "cgroup.procs")

    def seconds(self) -> float:
        return self._usage(self._folder)

    def pids(self) -> set[int]:
        return {int(line) for line in (self._folder / "cgroup.procs").read_text("ascii").split()}

    def close(self) -> None:
        # A group is busy until the kernel has taken its last process apart.
        until = time.monotonic() + _END_TIMEOUT_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.01)


def _usage_v1(folder: Path) -> float:
    return int((folder / "cpuacct.usage").read_text("ascii")) / 1e9


def _usage_v2(folder: Path) -> float:
    first = (folder / "cpu.stat").read_text("ascii").splitlines()[0]
    return int(first.removeprefix("usage_usec ")) / 1e6


def _parent_group() -> tuple[Path, Callable[[Path], float]] | None:
    """Return the folder of this process's control group that can have children, if there is one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
            number, controllers, path = line.split(":", 2)
            if "cpuacct" in controllers.split(","):
                parent, usage = _CGROUPS / controllers / path.lstrip("/"), _usage_v1
            elif number == "0":
                parent, usage = _CGROUPS / path.lstrip("/"), _usage_v2
            else:
                continue
            probe = parent / f"bench-{os.getpid()}-probe"
            with contextlib.suppress(OSError, ValueError):
                probe.mkdir()
                try:
                    usage(probe)
                finally:
                    probe.rmdir()
                return parent, usage
    return None


def accounting() -> str:
    """Return by what CPU time is counted here, in words."""
    if _parent_group() is None:
        return "the processes that live at that moment, and the children they have waited for"
    return "control groups of the kernel"


class ProcessTree:
    """One command and all that it has started.

    Args:
        argv: command line.
        environment: its environment.
        log: file for its output.
        marker: text that is in the environment of each of its processes and of no other process.
        account: control group for it, ``None`` where there is none.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        marker: str,
        account: _CpuAccount | None,
    ) -> None:
        self._marker = marker
        self._account = account
        self.log = log

        def enter() -> None:  # between fork and exec
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if account is not None:
                with open(account.processes, "w") as file:  # noqa: PTH123
                    file.write(str(os.getpid()))

        with log.open("ab") as output:
            self.root = subprocess.Popen(
                list(argv),
                env={**environment, _MARKER: marker},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=enter,  # noqa: PLW1509 - it only calls the kernel
            )

    @property
    def pid(self) -> int:
        """Process id of the command itself."""
        return self.root.pid

    def pids(self) -> set[int]:
        """Return the ids of the living processes."""
        found = self._account.pids() if self._account is not None else set(_marked(self._marker))
        return {pid for pid in found if _alive(pid)}

    def cpu_seconds(self) -> float:
        """Return user and system time of the whole tree until now."""
        if self._account is not None:
            return self._account.seconds()
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                total += sum(psutil.Process(pid).cpu_times()[:4])  # own and that of children it has waited for
        return total

    def kill(self) -> None:
        """Kill all processes and wait for their end."""
        until = time.monotonic() + _END_TIMEOUT_S
        while (alive := self.pids()) and time.monotonic() < until:
            for signal_number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, none can start another one
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal_number)
            self._reap(alive)
            time.sleep(0.005)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.root.wait(_END_TIMEOUT_S)
        if self._account is not None:
            self._account.close()
            self._account = None

    def _reap(self, pids: Collection[int]) -> None:
        for pid in pids:
            if pid != self.pid:  # that one is subprocess's
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


class Trees:
    """All commands that are started within a context.

    Args:
        logs: folder for their output.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._logs.mkdir(parents=True, exist_ok=True)
        self._nonce = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._started: list[ProcessTree] = []
        self._parent = _parent_group()

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> ProcessTree:
        """Start a command.

        Args:
            name: name of its log.
            argv: command line.
            environment: its environment.
        """
        number = next(self._numbers)
        account = None
        if self._parent is not None:
            parent, usage = self._parent
            account = _CpuAccount(parent / f"bench-{os.getpid()}-{self._nonce}-{number}", usage)
        tree = ProcessTree(argv, environment, self._logs / f"{name}.log", f"{self._nonce}-{number}", account)
        self._started.append(tree)
        return tree

    def logs(self, lines: int = 15) -> str:
        """Return the end of each log."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:])
            for path in sorted(self._logs.glob("*.log"))
        )

    def kill(self) -> None:
        """Kill all of them."""
        for tree in self._started:
            tree.kill()


@contextlib.contextmanager
def observed_trees(logs: Path) -> Iterator[Trees]:
    """Yield a place to start commands in, none of whose processes outlives it.

    Args:
        logs: folder for the output of the commands.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process, which reaps them
    trees = Trees(logs)
    try:
        yield trees
    finally:
        trees.kill()


def _marked(marker: str) -> Iterator[int]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARKER) == marker:
                yield process.pid


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
