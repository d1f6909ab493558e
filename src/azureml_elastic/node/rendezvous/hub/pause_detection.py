"""Durations of silence, without the time in which this process did not run and could receive nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

__all__ = ["PauseDetector"]

_MIN_PAUSES = 1000
"""Smallest number of pauses that are remembered; with one a second, a machine cannot train anyway."""


class PauseDetector:
    """Detector of the times in which this process did not run: stopped, swapped out, or on an overloaded machine.

    Messages that arrive during a pause may be read only after the clock. A timeout by the clock alone would then take
    all peers for lost because of a pause of this process.

    Args:
        clock: clock in seconds.
        tick: planned seconds between two calls of :meth:`tick`; a call that is more than one tick late ends a pause.
    """

    def __init__(self, clock: Callable[[], float], tick: float) -> None:
        self._clock = clock
        self._interval = tick
        self._last = clock()
        self._ends: list[float] = []
        self._paused = [0.0]
        """Total seconds of pauses, before the first of the ends and up to each of them."""

    def tick(self) -> float:
        """Record that the process runs, and return the seconds since the last call."""
        now = self._clock()
        elapsed, self._last = now - self._last, now
        if elapsed > 2 * self._interval:
            self._ends.append(now)
            self._paused.append(self._paused[-1] + elapsed - self._interval)
            if len(self._ends) > 2 * _MIN_PAUSES:
                del self._ends[:_MIN_PAUSES], self._paused[:_MIN_PAUSES]
        return elapsed

    def silence(self, since: float) -> float:
        """Return the seconds since a moment of the clock, without those of pauses."""
        return self._clock() - since - self._paused_since(since)

    def was_given_up(self, timeout: float) -> bool:
        """Return whether others may have given this process up, so that the end of a connection says nothing of them.

        At the beginning of a pause the last message to them is up to a tick old, and a pause is counted without a tick.

        Args:
            timeout: seconds of silence after which others give up.
        """
        self.tick()  # what others have done during a pause may be handled before the next tick
        return self._paused_since(self._clock() - 2 * timeout) >= timeout - 2 * self._interval

    def _paused_since(self, since: float) -> float:
        return self._paused[-1] - self._paused[bisect_right(self._ends, since)]
