"""How tests wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], object], timeout: float = 60.0, interval: float = 0.01) -> None:
    """Wait until a condition holds.

    Args:
        condition: function that is called repeatedly.
        timeout: seconds after which the test fails; long, for a busy machine.
        interval: seconds between two calls; longer for a condition that costs processor time.
    """
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(interval)
