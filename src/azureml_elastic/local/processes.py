"""Nodes as process trees that are started, frozen, resumed and killed as a whole.

Workers run in sessions of their own and may outlive their agent, so neither process groups nor parent ids find all of
them. Each node therefore has a marker in its environment, which its descendants inherit: its tree consists of the
agent's descendants *and* every process with that marker. This process is a *subreaper* meanwhile, so that orphans
become its children and do not stay as zombies.

``python -m azureml_elastic.local.processes NONCE`` is the watchdog of a launcher: when its standard input closes,
because the launcher has ended or was killed, it kills all processes with the launcher's marker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from typing_extensions import Self

from azureml_elastic.local.node_start import AgentProcess, NodeStart

MARKER = "AZUREML_ELASTIC_LOCAL_NODE"
"""Environment variable that marks a node's processes: ``<nonce of the launcher>/<name of the node>``."""

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_END_TIMEOUT_S = 10.0

_CLEANER = "torch_shm_manag"  # the kernel keeps 15 characters of a name
_CLEANING_S = 5.0

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the system has it


@dataclass(frozen=True)
class NodeProcess:
    """One node: its agent and all descendants of the agent.

    Args:
        marker: value of :data:`MARKER`, unique on this machine.
    """

    name: str
    log: Path
    marker: str
    agent: AgentProcess

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self.agent.pid

    def exit_code(self) -> int | None:
        """Return the agent's exit code, negative for a signal, or ``None`` while it runs."""
        return self.agent.poll()

    def tree(self) -> list[psutil.Process]:
        """Return the living processes of this node."""
        found = set(_marked(self.marker))
        if self.exit_code() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                agent = psutil.Process(self.pid)
                found.update([agent, *agent.children(recursive=True)])
        return [process for process in found if _alive(process)]

    def terminate(self) -> None:
        """Send SIGTERM to the agent only, as a preempted machine does."""
        self.agent.terminate()

    def freeze(self) -> None:
        """Stop all processes of the tree."""
        _freeze(self.tree)

    def thaw(self) -> None:
        """Resume all processes of the tree."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill(self, grace_s: float = 0.0) -> int:
        """Kill all processes of the tree and return how many there were, without those that clean up after others.

        Args:
            grace_s: time that the processes have to end by themselves.
        """
        limit = time.monotonic() + grace_s
        while time.monotonic() < limit and not all(map(_cleans_up, self.tree())):
            time.sleep(0.02)  # to look at all processes takes some milliseconds
        ended = _end_tree(self.tree)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(_END_TIMEOUT_S)
        _reap(ended)
        return len(ended)


class NodeProcesses:
    """All nodes of one cluster, a context manager that none of their processes outlives.

    A watchdog process kills them if this process is itself killed.

    Args:
        logs: folder for one log file per node.
        starting: what starts the agents; by default their commands are started.
    """

    def __init__(self, logs: Path, starting: NodeStart | None = None) -> None:
        self._logs = logs
        self.starting: NodeStart = starting or NodeStart()
        """What starts the agents."""
        self._nonce = secrets.token_hex(8)
        self._nodes: dict[str, NodeProcess] = {}

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._was_subreaper = set_subreaper(True)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", __name__, self._nonce],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Ctrl-C in the terminal, or the end of the launcher's process group, must not end the watchdog first.
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes.values():
            node.kill()
        _reap(_end_tree(self.remaining))
        cleaning = _marked(self._nonce + "/")
        _wait_for_end(cleaning, _CLEANING_S)
        for process in cleaning:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _reap(cleaning)
        self._watchdog.communicate()
        # Last, when all orphans are waited for: later ones are init's, which in a container may wait for none.
        set_subreaper(self._was_subreaper)

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> NodeProcess:
        """Start a node."""
        log, marker = self._logs / f"{name}.log", f"{self._nonce}/{name}"
        with log.open("ab") as output:
            agent = self.starting.start(argv, env={**environment, MARKER: marker}, output=output)
        self._nodes[name] = NodeProcess(name, log, marker, agent)
        return self._nodes[name]

    def remaining(self) -> list[psutil.Process]:
        """Return the living processes of all nodes, without those that clean up after others."""
        return [process for process in _marked(self._nonce + "/") if _alive(process) and not _cleans_up(process)]


def _marked(prefix: str) -> list[psutil.Process]:
    """Return the processes whose marker equals the prefix, or starts with it if the prefix ends with a slash."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            value = process.environ().get(MARKER, "")
            if value == prefix or (prefix.endswith("/") and value.startswith(prefix)):
                found.append(process)
    return found


def _end_tree(tree: Callable[[], Iterable[psutil.Process]]) -> set[psutil.Process]:
    """Kill a process tree, wait for its end and return the killed processes.

    All processes are stopped first, so that none can start another one unseen. Those that clean up after others know
    what processes have shared that ended before, and end by themselves.
    """
    frozen = _freeze(tree)
    killed = {process for process in frozen if not _cleans_up(process)}
    for process in frozen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill() if process in killed else process.resume()
    _wait_for_end(killed, _END_TIMEOUT_S)
    _remove_shared_memory(killed)
    return killed


def _wait_for_end(processes: Collection[psutil.Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.005)


def _cleans_up(process: psutil.Process) -> bool:
    """Return whether it is torch's process that removes shared tensors once their users have ended, 2 s before it."""
    try:
        return bool(process.name().startswith(_CLEANER))
    except psutil.NoSuchProcess:
        return False


def _remove_shared_memory(processes: Iterable[psutil.Process]) -> None:
    """Remove the tensors that killed processes have shared by torch's ``file_system`` strategy.

    A machine that is lost takes its memory with it. Here it stays where what removes the files was killed before.
    """
    for process in processes:
        for path in _SHARED_MEMORY.glob(f"torch_{process.pid}_*"):
            with contextlib.suppress(OSError):
                path.unlink()


def _freeze(tree: Callable[[], Iterable[psutil.Process]]) -> set[psutil.Process]:
    frozen: set[psutil.Process] = set()
    # A process may have started another one before it was stopped. A look that finds none that is new is the last.
    while fresh := set(tree()) - frozen:
        for process in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        frozen |= fresh
    return frozen


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _reap(processes: Iterable[psutil.Process]) -> None:
    """Collect the exit status of orphans, which have become children of this process."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)


def set_subreaper(wanted: bool) -> bool:
    """Make orphaned descendants children of this process where the system supports it; return the old setting."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
    return bool(before.value)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _end_tree(lambda: _marked(sys.argv[1] + "/"))
