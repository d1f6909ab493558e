"""How tests wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.support.costs.watch import FreeTime


def until(condition: Callable[[], object], timeout: float = 60.0, interval: float = 0.01) -> None:
    """Wait until a condition holds.

    Args:
        condition: function that is called repeatedly.
        timeout: seconds in which a core was free, after which the test fails: more where the machine is busy.
        interval: seconds between two calls; longer for a condition that costs processor time.
    """
    free = FreeTime()
    while not condition():
        assert free.seconds() < timeout, "it did not happen in time"
        time.sleep(interval)
