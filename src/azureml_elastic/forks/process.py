"""The client's side of a fork server: its process, what is asked of it, and what was forked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from azureml_elastic.forks.link import MOST_BYTES, receive, send

_END_SECONDS = 2.0

_ANSWER_SECONDS = 15.0
"""Time limit of a request, which waits for at most one import; see ``LATER`` in :mod:`.import_loader`."""


class ForkRefused(Exception):
    """The server cannot fork a process, for the reason in the message; it must be started by its command."""


class ForkedProcess:
    """A child process of this one, with the methods of ``subprocess.Popen`` that its users call.

    Args:
        argv: words that name the process in errors.
    """

    def __init__(self, pid: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._argv = list(argv)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code.

        Args:
            timeout: limit in seconds; ``None`` waits without limit.

        Raises:
            subprocess.TimeoutExpired: the process is still running.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        # waitpid() has no time limit.
        while (code := self.poll()) is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired(self._argv, timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            # Only before it was waited for: another process may have its id afterwards.
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def document(content: Any) -> Iterator[int]:
    """Yield the descriptor of a file without a name that holds a document."""
    with _anonymous_file() as file:
        file.write(json.dumps(content).encode())
        file.flush()
        yield file.fileno()


def _anonymous_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("azureml-elastic"), "w+b")
    return tempfile.TemporaryFile()


class ServerProcess:
    """A fork server that this process has started, with this process's end of the link.

    Args:
        command: function that returns the server's command for the descriptor of its end.
        popen: function that starts the process, with the arguments of ``subprocess.Popen``.

    Raises:
        ForkRefused: the process cannot be started.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environ: Mapping[str, str],
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        **options: Any,
    ) -> None:
        if sys.platform != "linux":
            raise ForkRefused(f"{sys.platform} is not Linux")
        self.link, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = _anonymous_file()
        words = command(server_end.fileno())
        with server_end, _anonymous_file() as output:
            try:
                self._process = popen(
                    words,
                    env=dict(environ),
                    stdout=output,
                    stderr=self._errors,
                    pass_fds=[server_end.fileno()],
                    start_new_session=True,
                    **options,
                )
            except OSError as error:
                self.close()
                raise ForkRefused(f"{words[0]!r} cannot be started: {error.strerror}") from error
        self.pid = self._process.pid

    def receive(self) -> dict[str, Any] | None:
        """Wait for the server's next message; return ``None`` if it has ended."""
        with contextlib.suppress(OSError):
            return receive(self.link)[0]
        return None

    def kill(self) -> None:
        """Kill the server."""
        self._process.kill()

    def disconnect(self) -> None:
        """Let the server end: it kills its workers and exits."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait(self) -> tuple[int, str]:
        """Wait for the server's end, kill it if that does not come; return the exit code and the end in words."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        if code < 0:
            return code, f"has ended by {signal.Signals(-code).name}"
        lines = [""]
        with contextlib.suppress(OSError, ValueError):
            lines = os.pread(self._errors.fileno(), MOST_BYTES, 0).decode(errors="replace").strip().split("\n")
        return code, f"has ended with exit code {code}" + (f": {lines[-1].strip()}" if lines[-1] else "")

    def close(self) -> None:
        """Close this end of the link, and what the server has written."""
        self.link.close()
        self._errors.close()


class ServerClient:
    """Sends requests to a fork server, which starts at once, and takes in its messages on a thread. Thread-safe.

    Args:
        name: what the server is called in reasons.
    """

    def __init__(self, start: Callable[[], ServerProcess], name: str) -> None:
        self._start_process = start
        self._name = name
        self._changes = threading.Condition(threading.RLock())
        self._ready = self._closed = False
        self._refusal: str | None = None
        self._requests = 0
        self._lost_requests = 0  # those up to this one were sent to a process that has ended
        self._answers: dict[int, dict[str, Any]] = {}
        self._process: ServerProcess | None = None
        self.since = time.monotonic()
        """Monotonic seconds at which the process was started."""
        self._reader: threading.Thread | None = None
        if self._start():
            self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
            self._reader.start()

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` if the process could not be started."""
        return None if self._process is None else self._process.pid

    @property
    def ready(self) -> bool:
        """Whether a process can be forked now."""
        with self._changes:
            return self._ready and self._refusal is None

    @property
    def refusal(self) -> str | None:
        """Reason why nothing can be forked any more, or ``None``."""
        with self._changes:
            return self._refusal

    def close(self) -> None:
        """End the process and its running workers."""
        with self._changes:
            self._closed = True
            self._refusal = self._refusal or "it was closed"
            self._changes.notify_all()
        if self._process is not None and self._reader is not None:
            self._process.disconnect()
            self._reader.join()  # which ends with the server
            self._process.close()

    def _request(self, operation: str, descriptors: Sequence[int], **fields: Any) -> int:
        """Have the server fork a process; return its id.

        Raises:
            ForkRefused: the process must be started plainly.
        """
        with self._changes:
            if not self.ready:
                raise ForkRefused(self._refusal or "its imports are not done")
            self._requests += 1
            number = self._requests
        self._send({"op": operation, "id": number, **fields}, descriptors)
        with self._changes:
            in_time = self._changes.wait_for(
                lambda: number in self._answers or number <= self._lost_requests or self._refusal is not None,
                _ANSWER_SECONDS,
            )
            answer = self._answers.pop(number, {})
            if not in_time:
                self._refuse(f"{self._name} did not answer within {_ANSWER_SECONDS:g} s")
                assert self._process is not None
                # It might still fork, and nobody would know of that process.
                self._process.kill()
            if "pid" not in answer:
                raise ForkRefused(answer.get("reason") or self._refusal or f"{self._name} has ended")
            return int(answer["pid"])

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._process is not None
        try:
            send(self._process.link, message, descriptors)
        except OSError as error:
            raise ForkRefused(self.refusal or f"{self._name} cannot be reached: {error}") from error

    def _refuse(self, reason: str) -> None:
        """Refuse all further requests, for the first reason."""
        with self._changes:
            self._refusal = self._refusal or reason
            self._changes.notify_all()

    def _start(self) -> bool:
        """Start the process, and return whether it runs."""
        try:
            process = self._start_process()
        except ForkRefused as refusal:
            self._refuse(str(refusal))
            return False
        with self._changes:
            if self._process is not None:
                self._process.close()
            self._process, self.since = process, time.monotonic()
            if self._closed:  # meanwhile
                process.disconnect()
        return True

    def _read(self) -> None:
        running = True
        while running:
            assert self._process is not None
            while message := self._process.receive():
                with self._changes:
                    self._receive(message)
                    self._changes.notify_all()
            running = self._end(self._process)

    def _receive(self, message: dict[str, Any]) -> None:
        """Take in a message; the caller holds the condition."""
        if message["op"] == "ready":
            self._ready = True
        elif message["op"] == "unsafe":
            self._refuse(message["reason"])
        elif "id" in message:
            self._answers[message["id"]] = message

    def _end(self, process: ServerProcess) -> bool:
        """Record the end of the process; return whether another one was started in its place."""
        self._refuse(f"{self._name} {process.wait()[1]}")
        return False
