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
import traceback
from dataclasses import dataclass

from azureml_elastic.forks.client import ForkedWorker, PreloadServer
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.rendezvous.link import Assignment

_END_SECONDS = 5.0


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
        queue: queue of the agent, which is woken when the process ends although it was not closed.
    """

    def __init__(self, assignment: Assignment, preload_server: PreloadServer | None, queue: EventQueue) -> None:
        assert assignment.listener is not None
        self._address = assignment.store_address
        # The assignment's own object is closed when this node leaves the round, maybe before the process has started.
        self._listener = socket.socket(fileno=assignment.listener.detach())
        self._preload_server = preload_server
        self._queue = queue
        self._closed = False
        self._keys = 0
        self._asked = False
        self._link, self._theirs = socket.socketpair()
        self._process: ForkedWorker | subprocess.Popen[bytes] | None = None
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
        self._exit_code()

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
                self._process = server.fork_store(host, port, *descriptors)
            if self._process is None:
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
                self._queue.wake()

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
        """Wait for the end of the process, and return its exit code as in :class:`StoreEnd`."""
        process = self._process
        if process is None:
            return 1
        try:
            code = process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # stopped, or still importing
            process.kill()
            code = process.wait()
        return None if isinstance(process, ForkedWorker) and process.ended_with_server else code
