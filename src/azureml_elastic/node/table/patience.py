"""Repeating a network call for a limited time.

The repetition is tenacity's, for the table's calls too, because the Azure SDK's own policy neither repeats an insert (a
POST) whose answer was lost, nor spreads its delays at random, nor ends after a given time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from azureml_elastic.errors import MissingExtra

try:
    from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential
except ImportError as missing:
    raise MissingExtra("tenacity", "node") from missing

__all__ = ["PATIENCE", "repeat"]

T = TypeVar("T")

PATIENCE = timedelta(seconds=10)
"""For one call, all its attempts together."""

_FIRST_DELAY_S = (
    0.1  # the longest that the first delay may be; it doubles each time, and the real one is random below it
)
_LONGEST_DELAY_S = 2.0
_SHORTEST_ATTEMPT_S = 0.1


def repeat(attempt: Callable[[float], T], retryable: Callable[[BaseException], bool], patience: timedelta) -> T:
    """Call until it succeeds, fails for good or the patience ends, and return or raise what the last attempt did.

    Args:
        attempt: is given the seconds that are left, as the limit for its own time-outs.
        retryable: whether an error may pass with time.
        patience: for all attempts and the delays between them.
    """
    deadline = time.monotonic() + patience.total_seconds()
    retrying = Retrying(
        retry=retry_if_exception(retryable),
        wait=wait_random_exponential(multiplier=_FIRST_DELAY_S, max=_LONGEST_DELAY_S),
        stop=stop_before_delay(patience.total_seconds()),
        reraise=True,
    )
    return retrying(lambda: attempt(max(deadline - time.monotonic(), _SHORTEST_ATTEMPT_S)))
