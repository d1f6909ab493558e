"""Durations of silence, without the time in which this process did not run and could receive nothing."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["PauseDetector"]

_MIN_PAUSES = 1000
"""Smallest number of pauses that are remembered; with one a second, a machine cannot train anyway."""


class PauseDetector:
    """Detector of the times in which this process did not run: stopped, swapped out, or on an overloaded machine.

    Messages that arrive during a pause may be read only after the clock. A timeout by the clock alone would then take
    all peers for lost because of a pause of this process.

    All times are those of one monotonic clock, in seconds.

    Args:
        now: present time.
        tick: planned seconds between two calls of :meth:`tick`; a call that is more than one tick late ends a pause.
    """

    def __init__(self, now: float, tick: float) -> None:
        self._interval = tick
        self._last = now
        self._ends: list[float] = []
        self._paused = [0.0]
        """Total seconds of pauses, before the first of the ends and up to each of them."""

    def tick(self, now: float) -> None:
        """Record that the process runs."""
        elapsed, self._last = now - self._last, now
        if elapsed > 2 * self._interval:
            self._ends.append(now)
            self._paused.append(self._paused[-1] + elapsed - self._interval)
            if len(self._ends) > 2 * _MIN_PAUSES:
                del self._ends[:_MIN_PAUSES], self._paused[:_MIN_PAUSES]

    def silence(self, since: float, now: float) -> float:
        """Return the seconds since a moment, without those of pauses."""
        return now - since - self._paused_since(since)

    def was_given_up(self, timeout: float, now: float) -> bool:
        """Return whether others may have given this process up, so that the end of a connection says nothing of them.

        At the beginning of a pause the last message to them is up to a tick old, and a pause is counted without a tick.

        Args:
            timeout: seconds of silence after which others give up.
            now: present time.
        """
        self.tick(now)  # what others have done during a pause may be handled before the next tick
        return self._paused_since(now - 2 * timeout) >= timeout - 2 * self._interval

    def _paused_since(self, since: float) -> float:
        return self._paused[-1] - self._paused[bisect_right(self._ends, since)]
