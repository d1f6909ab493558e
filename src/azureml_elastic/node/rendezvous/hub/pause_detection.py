"""How long somebody has been silent, less the time in which this process could not have heard them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

__all__ = ["PauseDetector"]

_PAUSES = 1000
"""Remembered at least; one a second would be a machine that cannot train anyhow."""


class PauseDetector:
    """The times in which this process did not run: paused, swapped out, or one of too many on its machine.

    What arrives in such a time may be read only after the clock has been looked at. Whoever judges silence by the clock
    alone then gives up everybody at once, because of a pause of its own.

    Args:
        clock: seconds.
        tick: seconds after which the process means to look again. One that looks a whole tick late was away.
    """

    def __init__(self, clock: Callable[[], float], tick: float) -> None:
        self._clock = clock
        self._tick = tick
        self._looked = clock()
        self._ends: list[float] = []
        self._away = [0.0]
        """Seconds away in all: before the first of the ends, and up to each of them."""

    def look(self) -> float:
        """Take note that the process runs.

        Returns:
            Seconds since it did so last.
        """
        now = self._clock()
        gap, self._looked = now - self._looked, now
        if gap > 2 * self._tick:
            self._ends.append(now)
            self._away.append(self._away[-1] + gap - self._tick)
            if len(self._ends) > 2 * _PAUSES:
                del self._ends[:_PAUSES], self._away[:_PAUSES]
        return gap

    def silence(self, since: float) -> float:
        """Return for how many seconds somebody has said nothing to a process that listened.

        Args:
            since: when they were heard last, by the clock.
        """
        return self._clock() - since - (self._away[-1] - self._away[bisect_right(self._ends, since)])
