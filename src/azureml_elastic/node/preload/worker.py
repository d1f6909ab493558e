"""A worker that was forked from the warm process, as the agent sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

__all__ = ["ForkedWorker"]


class ForkedWorker:
    """A forked worker, with the part of :class:`subprocess.Popen` that torch's contexts use.

    Args:
        pid: of the worker.
        command: that would have started it cold.
        changes: notified when it has ended.
        reap: called once its end has been noticed, after which its process id may be given to another process.
    """

    def __init__(
        self, pid: int, command: Sequence[str], changes: threading.Condition, reap: Callable[[int], None]
    ) -> None:
        self.pid = pid
        self.args = list(command)
        self.returncode: int | None = None
        """The exit code, negative for the signal that ended it; ``None`` until :meth:`poll` has seen it end."""
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
        """Wait for the worker's end and return its exit code.

        Args:
            timeout: in seconds; ``None`` waits for ever.

        Raises:
            subprocess.TimeoutExpired: it still runs.
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
        """Whether its end has not been told yet, be it noticed or not."""
        return self._ended is None

    def end(self, code: int) -> None:
        """Take note of its end. For the warm process's own reader, which holds ``changes``."""
        self._ended = code
        self._changes.notify_all()
