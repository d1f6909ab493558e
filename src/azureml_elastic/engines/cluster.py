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
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import psutil

from azureml_elastic.engines.engine import RoundStore
from azureml_elastic.environment.engine import EngineEnvironment
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
        command: command with its arguments.
        variables: environment variables, in addition to those of this process, but for its place as a worker.
        stop_signal: signal that lets it end by itself.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None, stop_signal: int = signal.SIGTERM
    ) -> None:
        self.command = tuple(command)
        self._stop_signal = stop_signal
        self._process = subprocess.Popen(
            self.command,
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
        """Call a function until its result is true, the process has ended or some seconds are over.

        Returns:
            The function's last result.
        """
        until = time.monotonic() + timeout
        while not (result := condition()) and self.exit_code is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return result

    def stop(self, timeout: float = 2.0) -> None:
        """Have it end by itself, and kill what is left after some seconds. What it has started ends, too."""
        tree = self.tree()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(self._stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        for process in {*tree, *self.tree()}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def tree(self) -> list[psutil.Process]:
        """Return the process and all that it has started, as far as they run."""
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


_LOG = logging.getLogger(__name__)

_ADDRESS = "address"
"""Name of the head's address in the round's store."""


class Cluster(Protocol):
    """The cluster of a framework, as one node takes part in it. Not thread-safe."""

    def use_key(self, key: bytes) -> None:
        """Have all connections authenticated with a key that only the run's nodes have. Called before all others."""

    def start_head(self) -> str:
        """Start the head on this node, and return its address once it accepts connections.

        Raises:
            EngineError: it has not started.
        """

    def start_member(self, address: str) -> Child | None:
        """Start this node's member of the cluster with this head; the one before is gone.

        Returns:
            The member, ``None`` where this node has the head and needs no other process.
        """

    def retire_member(self, address: str) -> None:
        """Have the cluster move what this node's member holds to others. Blocks until it is done, or cannot be done."""

    def variables(self, address: str) -> Mapping[str, str]:
        """Return the environment variables by which the program finds the cluster."""

    def check(self) -> None:
        """Raise if the head of this node has ended.

        Raises:
            EngineError: it has ended.
        """

    def stop_head(self) -> None:
        """End the head, if this node has it."""


class ClusterEngine:
    """Keeps this node in the cluster and, on the first node, the head and the program; an engine.

    Args:
        cluster: cluster of a framework.
        program: command of the program.
    """

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
                return 128 - code if code < 0 else code
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
            self._member.stop(timeout=0)
            self._member = None
