"""Handle of a worker forked by the preload server."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["ForkedWorker"]


@dataclass(eq=False)
class ForkedWorker:
    """Forked worker, with the part of the :class:`subprocess.Popen` interface that torch uses.

    Args:
        pid: process id.
        args: command for a plain start of the same worker.
        changes: condition that is notified when a worker ends.
        reap: function called once the exit code was read; afterwards the kernel may reuse the process id.
    """

    pid: int
    args: tuple[str, ...]
    changes: threading.Condition
    reap: Callable[[int], None]
    returncode: int | None = field(default=None, init=False)
    """Exit code, negative for a signal; ``None`` until :meth:`poll` has returned it."""
    _reported: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Return the exit code, ``None`` while the worker runs."""
        with self.changes:
            if self.returncode is None and self._reported is not None:
                self.returncode = self._reported
                self.reap(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the worker and return its exit code.

        Args:
            timeout: limit in seconds; ``None`` waits without limit.

        Raises:
            subprocess.TimeoutExpired: the worker is still running.
        """
        with self.changes:
            self.changes.wait_for(lambda: not self.running, timeout)
            code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the worker has ended."""
        with self.changes:
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    @property
    def running(self) -> bool:
        """Whether no exit code has been reported yet."""
        return self._reported is None

    def end(self, code: int) -> None:
        """Record the exit code; the caller holds ``changes``."""
        self._reported = code
        self.changes.notify_all()
