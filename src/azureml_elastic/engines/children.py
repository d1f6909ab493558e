"""Child processes of an engine, which end with it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import psutil

from azureml_elastic.environment.engine import EngineEnvironment

__all__ = ["Child"]

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
