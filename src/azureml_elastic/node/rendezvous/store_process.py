"""The round's key-value store as the agents see it: a process beside rank 0's agent, which has no torch itself.

The process is forked from the preload server, which has imported torch anyway; where that cannot fork, it is a new
interpreter. It serves the socket that the agent has listened on since before the round was sealed, so that clients that
connect meanwhile wait instead of failing. A connection between agent and process tells each of the other's end: with
the agent the process ends, and with the process the round.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from azureml_elastic.forks.client import PreloadServer
from azureml_elastic.node.core.actions import Reopen
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous

__all__ = ["RoundStore", "StoreEnd", "StoreProcess", "enter", "open_round_store", "reaches"]

_POLL_SECONDS = 0.05

_ATTEMPT_SECONDS = 3.0
"""Timeout of a connection: long enough for TCP's second attempt."""

_RETRY_SECONDS = 2.0
"""Time for which a refused connection is tried again: the hub may report meanwhile that rank 0's node is lost, which
names the cause."""

_END_SECONDS = 5.0

_Store = TypeVar("_Store")


@dataclass(frozen=True)
class StoreEnd:
    """How the process of a store has ended although it was not closed.

    Args:
        exit_code: its exit code, negative for a signal; ``None`` where the preload server has ended with it.
        error: the traceback that it has reported, empty without one.
    """

    exit_code: int | None
    error: str = ""


class RoundStore:
    """The store of a round as its agents see it; this one is another node's, whose agent looks after it."""

    end: StoreEnd | None = None
    """How the process that this node had for it has ended although it was not closed: no worker can connect."""

    def has_keys(self) -> bool:
        """Return whether workers had set keys when the process last reported, and have it report again."""
        return False

    def close(self) -> None:
        """End the process of this node."""


class StoreProcess(RoundStore):
    """Handle of the process that serves the store of a round, on rank 0's node.

    The process starts while the workers get their places: those that connect before it serves wait for it.

    Args:
        assignment: rank 0's assignment, whose listening socket the process takes over.
        preload_server: server that forks the process, ready; ``None`` starts a new interpreter.
        wake: event that is set when the process ends although it was not closed.
    """

    def __init__(self, assignment: Assignment, preload_server: PreloadServer | None, wake: threading.Event) -> None:
        assert assignment.listener is not None
        self._address = assignment.store_address
        # The assignment's own object is closed when this node leaves the round, maybe before the process has started.
        self._listener = socket.socket(fileno=assignment.listener.detach())
        self._preload_server = preload_server
        self._wake = wake
        self._closed = False
        self._keys = 0
        self._asked = False
        self._link, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._forked: int | None = None
        self._thread = threading.Thread(target=self._run, name="store-process", daemon=True)
        self._thread.start()

    def has_keys(self) -> bool:
        """See :class:`RoundStore`."""
        # One question at a time: a process that hangs must not fill the socket, on which the agent would then wait.
        if not self._asked:
            self._asked = True
            with contextlib.suppress(OSError):
                self._link.send(b"?")
        return self._keys > 0

    def close(self) -> None:
        """See :class:`RoundStore`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        # The thread reads until the connection ends.
        self._thread.join()
        self._link.close()
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # stopped, or still importing
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        """Start the process.

        Raises:
            OSError: the interpreter cannot be started.
        """
        host, port = self._address
        with self._theirs, self._listener:
            descriptors = [self._listener.fileno(), self._theirs.fileno()]
            server = self._preload_server
            if server is not None:
                self._forked = server.fork_store(host, port, *descriptors)
            if self._forked is None:
                module = "azureml_elastic.forks.store_server"
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, host, str(port), *map(str, descriptors)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C and the signals of a job's end are for the agent to act on
                )

    def _run(self) -> None:
        try:
            self._start()
        except OSError:
            error = traceback.format_exc()
        else:
            error = self._read()
        if not self._closed:
            end = StoreEnd(self._exit_code(), error)
            if not self._closed:  # the code may have taken a moment to come
                self.end = end
                self._wake.set()

    def _read(self) -> str:
        """Take in what the process sends until its end; return the error that it has reported, if it has."""
        error = ""
        # Reset, where it has not taken what it was sent.
        with self._link.makefile("rb") as lines, contextlib.suppress(ConnectionResetError):
            for line in lines:
                answer = json.loads(line)
                if isinstance(answer, str):
                    error = answer
                else:
                    self._keys = answer
                    self._asked = False
        return error

    def _exit_code(self) -> int | None:
        if self._forked is not None and self._preload_server is not None:
            return self._preload_server.exit_code_of_store(self._forked)
        if self._process is None:
            return 1
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def open_round_store(
    assignment: Assignment, rendezvous: Rendezvous, preload_server: Callable[[], PreloadServer | None]
) -> RoundStore | None:
    """Serve the store of a round on rank 0's node, and verify elsewhere that it can be reached.

    Args:
        preload_server: function that returns the preload server once it is ready; ``None`` if it cannot fork.

    Returns:
        The store, or ``None`` if the round has broken or its port cannot be reached.
    """
    if assignment.listener is not None:
        return StoreProcess(assignment, preload_server(), rendezvous.wake)
    reached = reaches(assignment.store_address, lambda: rendezvous.status().broken, rendezvous.store_failed)
    return RoundStore() if reached else None


def enter(
    rendezvous: Rendezvous,
    open_store: Callable[[Assignment], _Store | None],
) -> tuple[Assignment, _Store]:
    """Join the next round and open its store, again if the round breaks before that.

    Args:
        open_store: function that opens the store of a round, ``None`` where that is not possible.

    Raises:
        RunSucceeded, RunFailed, NodeLeaving: see :meth:`Rendezvous.join`.
    """
    while True:
        assignment = rendezvous.join()
        store = open_store(assignment)
        if store is not None:
            return assignment, store
        status = rendezvous.status()
        if not status.over or status.lost:
            reason = "the round's store cannot be reached"
            rendezvous.round_end.reopen(Reopen(reason, lost=status.lost, round_failed=not status.lost))


def reaches(
    address: tuple[str, int], broken: Callable[[], bool], unreachable: Callable[[OSError, float], None]
) -> bool:
    """Return whether a port accepts connections, before this node's workers wait for it.

    Args:
        broken: function that returns whether the round has broken, which ends the attempts.
        unreachable: callback with the error and the timeout of a connection in seconds, where the port cannot be
            reached and the round is whole nevertheless.
    """
    errors: list[OSError] = []
    reached = threading.Event()

    def connect() -> None:
        # On a thread: the look-up of a name, and a port that a firewall blocks, do not answer for seconds.
        until = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                socket.create_connection(address, _ATTEMPT_SECONDS).close()
            except OSError as error:
                if time.monotonic() >= until:
                    errors.append(error)
                    return
                time.sleep(_POLL_SECONDS)
            else:
                reached.set()
                return

    thread = threading.Thread(target=connect, name="store probe", daemon=True)
    thread.start()
    while thread.is_alive() and not broken():
        thread.join(_POLL_SECONDS)
    if errors and not broken():
        unreachable(errors[0], _ATTEMPT_SECONDS)
    return reached.is_set()
