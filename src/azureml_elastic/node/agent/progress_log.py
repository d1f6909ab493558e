"""The steps of a node in the ledger: not all of them, but the last one of each round."""

from __future__ import annotations

import threading
import time

from azureml_elastic.ledger.events import Progress
from azureml_elastic.node.io.event_rate import EventRate
from azureml_elastic.node.io.event_recorder import Recorder

__all__ = ["ProgressLog"]


class ProgressLog:
    """Writer of completed steps, fewer the longer the node runs; thread-safe.

    Args:
        recorder: writer of the ledger's events.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._rate = EventRate()
        self._samples = 0
        self._last: tuple[int, int, float] | None = None
        self._recorded = self._closed = True

    def completed(self, number: int, step: int, samples: int = 0) -> None:
        """Record a step of a round, or keep it until a later one or the end of the round.

        Args:
            number: number of the round.
            step: number of completed steps of the run.
            samples: number of samples over all nodes since the step before, 0 if they are not counted.
        """
        with self._lock:
            if self._last is not None and number == self._last[0] and step <= self._last[1]:
                return  # another local worker has reported it
            if self._last is not None and number != self._last[0]:
                self._write(last=True)
                self._samples = 0
            self._samples += samples
            self._last = number, step, time.time()
            self._recorded = self._closed = False
            if self._rate.due():
                self._write(last=False)

    def flush(self) -> None:
        """Record the last step of the round as such, unless that was done."""
        with self._lock:
            self._write(last=True)

    def _write(self, *, last: bool) -> None:
        if self._last is not None and not (self._closed if last else self._recorded):
            number, step, at = self._last
            self._recorded, self._closed = True, last
            self._recorder.record(Progress, number, at, step=step, last=last, samples=self._samples or None)
