"""The logged values of rank 0's worker in the ledger: the last one of each name within an interval."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from azureml_elastic.ledger.events import Metrics
from azureml_elastic.node.io.event_rate import EventRate
from azureml_elastic.node.io.event_recorder import Recorder

__all__ = ["MetricsLog"]

_LOG = logging.getLogger(__name__)

_LONGEST_SECONDS = 60.0
"""Longest time between two records, however long the node has run: someone may look at them."""

_MOST_NAMES = 1000
"""Largest number of names within an interval."""


class MetricsLog:
    """Writer of logged values, fewer the longer the node runs, but once a minute; thread-safe.

    The last value of each name within an interval is recorded, with its step. The last ones of a round are recorded at
    its end.

    Args:
        recorder: writer of the ledger's events.
        clock: clock in monotonic seconds.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._lock = threading.Lock()
        self._rate = EventRate(clock)
        self._recorded_at = -_LONGEST_SECONDS
        self._round = 0
        self._latest: dict[str, tuple[int, float, float]] = {}
        self._warned = False

    def logged(self, number: int, step: int, values: Mapping[str, float]) -> None:
        """Record values of a step, or keep them until later ones or the end of the round.

        Args:
            number: number of the round.
            step: step that the values belong to.
            values: values by name.
        """
        with self._lock:
            if number < self._round:
                return  # of a round whose values are recorded
            if number > self._round:
                self._write()
                self._round = number
            at = time.time()
            for name, value in values.items():
                if name in self._latest or len(self._latest) < _MOST_NAMES:
                    self._latest[name] = step, at, value
                elif not self._warned:
                    self._warned = True
                    _LOG.warning(
                        "The script has logged more than %d names in a short time: %r and others are dropped. Log "
                        "values of one kind under one name.",
                        _MOST_NAMES,
                        name,
                    )
            now = self._clock()
            if self._rate.due() or now - self._recorded_at >= _LONGEST_SECONDS:
                self._recorded_at = now
                self._write()

    def flush(self) -> None:
        """Record the last values of the round, unless that was done."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        by_step: dict[int, dict[str, float]] = {}
        times: dict[int, float] = {}
        for name, (step, at, value) in self._latest.items():
            by_step.setdefault(step, {})[name] = value
            times[step] = at
        self._latest = {}
        for step in sorted(by_step):
            self._recorder.record(Metrics, self._round, times[step], step=step, values=by_step[step])
