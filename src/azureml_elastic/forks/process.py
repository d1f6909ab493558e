"""Processes on the client's side: the fork server that it has started, and what was forked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from azureml_elastic.forks.link import MOST_BYTES, receive

_END_SECONDS = 2.0


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
        options: further arguments for it.

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
