"""Actions at moments of simulated time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

__all__ = ["Timers"]


class Timers:
    """Actions in the order of their time; those of the same time in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def next(self) -> float:
        """Time of the next action; infinite without one."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, time: float, action: Callable[[], None]) -> None:
        """Add an action."""
        heapq.heappush(self._heap, (time, next(self._numbers), action))

    def fire(self) -> None:
        """Do the next action."""
        heapq.heappop(self._heap)[2]()
