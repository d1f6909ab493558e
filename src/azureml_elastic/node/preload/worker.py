"""Handle of a worker forked by the preload server."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

__all__ = ["ForkedWorker"]


class ForkedWorker:
    """Forked worker, with the part of the :class:`subprocess.Popen` interface that torch uses.

    Args:
        pid: process id.
        command: command for a plain start of the same worker.
        changes: condition that is notified when a worker ends.
        reap: function called once the end was read; afterwards the kernel may reuse the process id.
    """

    def __init__(
        self, pid: int, command: Sequence[str], changes: threading.Condition, reap: Callable[[int], None]
    ) -> None:
        self.pid = pid
        self.args = list(command)
        self.returncode: int | None = None
        """Exit code, negative for a signal; ``None`` until :meth:`poll` has returned it."""
        self._changes = changes
        self._reap = reap
        self._ended: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, ``None`` while the worker runs."""
        with self._changes:
            if self.returncode is None and self._ended is not None:
                self.returncode = self._ended
                self._reap(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the worker and return its exit code.

        Args:
            timeout: limit in seconds; ``None`` waits without limit.

        Raises:
            subprocess.TimeoutExpired: the worker is still running.
        """
        with self._changes:
            self._changes.wait_for(lambda: self._ended is not None, timeout)
            code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the worker has ended."""
        with self._changes:
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    @property
    def runs(self) -> bool:
        """Whether the end of the worker has not been reported yet."""
        return self._ended is None

    def end(self, code: int) -> None:
        """Record the exit code; the caller holds ``changes``."""
        self._ended = code
        self._changes.notify_all()
