"""The rate at which a node records events that come with each step, so that a long run's ledger stays small."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["EventRate"]

_SHORTEST_SECONDS = 0.05
"""Shortest time between two recorded events."""

_SHARE = 0.02
"""Shortest time between two recorded events as a share of the time since the first one."""


class EventRate:
    """Decides when the next of many similar events is recorded: 20 a second at first, and fewer as time goes on.

    The pause between two recorded events is 2 % of the time since the first one, so that any part of the run is as
    detailed as the whole of it is long: some 300 events in the first hour, 600 in a week.

    Args:
        clock: clock in monotonic seconds.
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
