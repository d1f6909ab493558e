"""The steps of a node in the ledger: not all of them, but the last one of each round."""

from __future__ import annotations

import threading
import time

from azureml_elastic.ledger.events import Progress
from azureml_elastic.node.agent.event_recorder import Recorder

__all__ = ["ProgressLog"]

_SECONDS = 0.05


class ProgressLog:
    """Writer of completed steps, at most 20 a second; thread-safe.

    Args:
        recorder: writer of the ledger's events.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._recorded = 0.0
        self._last = (0, 0)
        self._pending: float | None = None

    def completed(self, number: int, step: int) -> None:
        """Record a step of a round, or keep it until a later one or the end of the round."""
        now = time.monotonic()
        with self._lock:
            if (number, step) == self._last:
                return
            if number != self._last[0]:
                self._write()
            self._last, self._pending = (number, step), time.time()
            if now - self._recorded >= _SECONDS:
                self._recorded = now
                self._write()

    def flush(self) -> None:
        """Record the last step, unless it is recorded."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._pending is not None:
            at, self._pending = self._pending, None
            self._recorder.record(Progress, self._last[0], at, step=self._last[1])
