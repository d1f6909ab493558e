"""The cluster of a framework, and one program that uses it.

The first node of a round (rank 0) has the *head*, every node has a *member* that is connected to it, and the program
runs on the first node, with the head's address in its environment. A round that begins with the same first node keeps
the head, the program and all members: nodes come and go without a restart. With another first node, the cluster and
the program are started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import psutil

from azureml_elastic.engines.engine import RoundStore
from azureml_elastic.environment.engine import EngineEnvironment
from azureml_elastic.errors import EngineError
from azureml_elastic.ipc.agent_interface import WorkerIdentity

__all__ = ["Child", "Cluster", "ClusterEngine"]

_T = TypeVar("_T")
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class Child:
    """A process of this node, with all processes that it has started.

    It stays in the process group of this process, which the agent ends as a whole, and is killed when this process
    dies.

    Args:
        variables: environment variables, in addition to those of this process, but for its place as a worker.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=EngineEnvironment.read().for_child(variables),
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - two system calls, which take no lock of another thread
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; negative for the signal that ended it, ``None`` while it runs."""
        return self._process.poll()

    def wait_for(self, condition: Callable[[], _T], timeout: float) -> _T:
        """Call a function until its result is true, the process has ended or some seconds are over; return the last."""
        until = time.monotonic() + timeout
        while not (result := condition()) and self.exit_code is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return result

    def stop(self, timeout: float = 2.0) -> None:
        """Have it end by itself, and kill what is left after some seconds. What it has started ends, too.

        Args:
            timeout: seconds to end by itself, 0 for a kill at once.
        """
        found = set(self.tree())  # before the signal: the children of a process that has ended cannot be found from it
        until = time.monotonic() + timeout
        if timeout > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        while self.exit_code is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            found.update(self.tree())  # what drains may still start processes, such as Ray's workers
        _kill(found | set(self.tree()))
        self._process.wait()

    def tree(self) -> list[psutil.Process]:
        """Return the process and all that it has started, as far as they run."""
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _kill(processes: set[psutil.Process]) -> None:
    """Kill processes and all that they have started."""
    stopped: set[psutil.Process] = set()
    # Stopped before they are killed: one that runs may start another one after a look at its children, which cannot be
    # found once its parent is dead. A signal takes a moment: the last look is one that finds no new process.
    while processes:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        stopped |= processes
        processes = _children(stopped) - stopped
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _children(parents: set[psutil.Process]) -> set[psutil.Process]:
    found, pids = set(), {parent.pid for parent in parents}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.ppid() in pids:
                found.add(process)
    return found


def _end_with_parent() -> None:
    # The kernel sends it at the end of the thread that has forked, not of its process: the main thread starts children.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Were it ignored in this process, it would be in the program as well, and stop() could not ask that to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


_LOG = logging.getLogger(__name__)

_ADDRESS = "address"
"""Name of the head's address in the round's store."""


class Cluster(ABC):
    """The cluster of a framework, as one node takes part in it. Not thread-safe.

    Args:
        host: address of this node, which the others reach.
        folder: folder for the files of the cluster, which only this process's user can enter.
    """

    head_name: str
    """What messages call the head."""
    head_stop_seconds = 2.0

    def __init__(self, host: str, folder: str) -> None:
        self._host = host
        self._folder = folder
        self._head: Child | None = None
        self._newest = ""  # what a key gives for the connections of the next cluster
        self._of_cluster: dict[str, str] = {}  # the same for each cluster so far, by the address of its head

    def use_key(self, key: bytes) -> None:
        """Have all connections authenticated with a key that only the run's nodes have. Called before all others.

        A cluster keeps the key that it has begun with: its processes stay when the run gets another one.

        Raises:
            EngineError: there is no key.
        """
        self._newest = self._credentials(key)

    def credentials_of(self, address: str) -> str:
        """Return what :meth:`_credentials` has returned when this node learned of the cluster with this head."""
        return self._of_cluster.setdefault(address, self._newest)

    @abstractmethod
    def _credentials(self, key: bytes) -> str:
        """Return what authenticates connections by a key: a token, or a file."""

    @abstractmethod
    def start_head(self) -> str:
        """Start the head on this node, and return its address once it accepts connections.

        Raises:
            EngineError: it has not started.
        """

    @abstractmethod
    def start_member(self, address: str) -> Child | None:
        """Start this node's member of the cluster with this head; the one before is gone.

        Returns:
            The member, ``None`` where this node has the head and needs no other process.
        """

    @abstractmethod
    def retire_member(self, address: str) -> None:
        """Have the cluster move what this node's member holds to others. Blocks until it is done, or cannot be done."""

    @abstractmethod
    def variables(self, address: str) -> Mapping[str, str]:
        """Return the environment variables by which the program finds the cluster."""

    def check(self) -> None:
        """Raise if the head of this node has ended.

        Raises:
            EngineError: it has ended.
        """
        if self._head is not None and (code := self._head.exit_code) is not None:
            raise EngineError(
                f"{self.head_name} on {self._host} has ended with {code}; its output is in the node's log."
            )

    def stop_head(self) -> None:
        """End the head, if this node has it."""
        head, self._head = self._head, None
        if head is not None:
            head.stop(self.head_stop_seconds)


class ClusterEngine:
    """Keeps this node in the cluster and, on the first node, the head and the program; an engine."""

    def __init__(self, cluster: Cluster, program: Sequence[str]) -> None:
        self._cluster = cluster
        self._command = tuple(program)
        self._store: RoundStore | None = None
        self._leads = False
        self._address: str | None = None
        """Address of the head that this node's member is connected to, or that is on this node."""
        self._member: Child | None = None
        self._program: Child | None = None

    def enter(self, place: WorkerIdentity, store: RoundStore) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        self._store = store
        self._cluster.use_key(store.key)
        if place.rank == 0:
            self._lead(store)
        elif self._leads:
            self.stop()  # this node was thought to be lost, and another one has the head and the program

    def poll(self) -> int | None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        assert self._store is not None
        if self._program is not None:
            self._cluster.check()
            if (code := self._program.exit_code) is not None:
                return 128 - code if code < 0 else code  # of a signal, as a shell names it
        address = self._store.get(_ADDRESS)
        if address is not None:
            self._follow(address.decode())
        return None

    def round_over(self) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""

    def leave(self) -> bool:
        """Move what this node holds to others. Where it has the head, all is lost with it."""
        if self._member is not None and self._address is not None and not self._leads:
            self._cluster.retire_member(self._address)
        return True

    def stop(self) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        if self._program is not None:
            self._program.stop()
            self._program = None
        self._stop_member()
        self._cluster.stop_head()
        self._leads, self._address = False, None

    def _lead(self, store: RoundStore) -> None:
        """Have the head and the program on this node: those of the round before, if they are here."""
        if not self._leads:
            self.stop()
            self._address = self._cluster.start_head()
            self._leads = True
        assert self._address is not None
        # Also where nothing has changed: each round has a store of its own, in which other nodes look for the address.
        store.set(_ADDRESS, self._address.encode())
        self._follow(self._address)
        if self._program is None:
            self._program = Child(self._command, self._cluster.variables(self._address))

    def _follow(self, address: str) -> None:
        """Have a member that is connected to this head."""
        if self._member is not None and self._address == address:
            if (code := self._member.exit_code) is None:
                return
            _LOG.warning("The node's member of the cluster has ended with %d; starting another one.", code)
        self._stop_member()
        self._address = address
        self._member = self._cluster.start_member(address)

    def _stop_member(self) -> None:
        if self._member is not None:
            self._member.stop(timeout=0)  # at once: what it holds was moved by leave(), or its cluster is gone
            self._member = None
