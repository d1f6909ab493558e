"""What a node writes into the ledger of steps, logged values and saved files, at a rate that keeps it small."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from azureml_elastic.ledger.events import Metrics, Progress, RanksConnecting, StateSaved
from azureml_elastic.node.records.event_recorder import Recorder

_SHORTEST_SECONDS = 0.05
"""Shortest time between two recorded events."""

_SHARE = 0.02
"""Shortest time between two recorded events as a share of the time since the first one."""


class EventRate:
    """Decides when the next of many similar events is recorded: 20 a second at first, and fewer as time goes on.

    The pause between two recorded events is 2 % of the time since the first one, so that any part of the run is as
    detailed as the whole of it is long: some 300 events in the first hour, 600 in a week.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None
        self._next = 0.0

    def due(self) -> bool:
        """Return whether an event that happens now is to be recorded; true counts as recorded."""
        now = self._clock()
        if self._first is None:
            self._first = now
        elif now < self._next:
            return False
        self._next = now + max(_SHORTEST_SECONDS, _SHARE * (now - self._first))
        return True


_LOG = logging.getLogger(__name__)

_LONGEST_SECONDS = 60.0
"""Longest time between two records, however long the node has run: someone may look at them."""

_MOST_NAMES = 1000
"""Largest number of names within an interval."""


class MetricsLog:
    """Writer of logged values, fewer the longer the node runs, but once a minute; thread-safe.

    The last value of each name within an interval is recorded, with its step. The last ones of a round are recorded at
    its end.
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
        """Record values of a step, or keep them until later ones or the end of the round."""
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


class ProgressLog:
    """Writer of completed steps, fewer the longer the node runs; thread-safe."""

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


class ObservationLog:
    """Writer of when workers begin to connect to each other, and of the last save of each round."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._number = 0
        self._connecting = self._alone = False
        self._since = 0.0

    def entered(self, number: int, world_size: int) -> None:
        """The node has entered a round.

        Args:
            world_size: number of workers of the round; a single one may train without having connected.
        """
        self._number, self._connecting, self._alone = number, False, world_size == 1
        self._since = time.time()

    def connecting(self, *, record: bool) -> None:
        """The workers of the round have begun to connect to each other; called again and again from then on.

        Args:
            record: whether this node is to write it.
        """
        if not self._connecting:
            self._connecting, self._since = True, time.time()
            if record:
                self._recorder.record(RanksConnecting, self._number, self._since)

    def left(self, saved_at: float) -> None:
        """Record the last save of the round. What was saved before the workers began to connect is prepared data.

        Args:
            saved_at: when it began, in seconds since the epoch; 0 if there was none.
        """
        if saved_at >= self._since and (self._connecting or self._alone):
            self._recorder.record(StateSaved, self._number, saved_at)
