"""A process that an engine starts, with all that it starts itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from azureml_elastic.environment.engine import EngineEnvironment

_T = TypeVar("_T")
_POLL_SECONDS = 0.02
_SUBREAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subreaper.py")))
_CHILDREN: list[Child] = []


class Child:
    """A process of this node, with all that it has started: nothing of it is left once this has ended.

    It is below a :mod:`~azureml_elastic.engines.subreaper`, which kills all when this process dies, in whatever way.

    Args:
        variables: environment variables, in addition to those of this process, but for its place as a worker.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [*_SUBREAPER, str(os.getpid()), *command],
            env=EngineEnvironment.read().for_child(variables),
            # The agent kills this process's group. The subreaper must outlive it to kill what has left the group.
            start_new_session=True,
        )
        _CHILDREN.append(self)

    @property
    def pid(self) -> int:
        """Process id of the parent of all."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code once all have ended, 128 and more for a signal, as in a shell; ``None`` while one runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait_for(self, condition: Callable[[], _T], timeout: float) -> _T:
        """Call a function until its result is true, the process has ended or some seconds are over; return the last."""
        until = time.monotonic() + timeout
        while not (result := condition()) and self.exit_code is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return result

    def stop(self, timeout: float = 2.0) -> None:
        """Have it end by itself, and kill what is left then, or after some seconds. What it has started ends, too.

        Args:
            timeout: seconds to end by itself, 0 for a kill at once.
        """
        if timeout > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()
        self._process.wait()
        with contextlib.suppress(ValueError):  # it has been stopped before
            _CHILDREN.remove(self)

    def kill(self) -> None:
        """Have all killed, without a wait. Thread-safe."""
        self._process.send_signal(signal.SIGUSR1)

    def tree(self) -> list[psutil.Process]:
        """Return the processes, as far as they run."""
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def kill_children() -> None:
    """Kill all children of this process, and return when nothing is left of them. Thread-safe."""
    children = list(_CHILDREN)
    for child in children:
        child.kill()
    for child in children:
        child.stop(timeout=0)
