"""How tests wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], object], patience: float = 60.0) -> None:
    """Wait for a condition.

    Args:
        condition: asked again and again.
        patience: seconds after which the test fails; long, for a busy machine.
    """
    limit = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.01)
