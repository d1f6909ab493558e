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
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay, wait_random_exponential
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
_LONGEST_WISH_S = 5.0  # of the other side; it may not use up the patience with one answer
_SHORTEST_ATTEMPT_S = 0.1


def repeat(
    attempt: Callable[[float], T],
    retryable: Callable[[BaseException], bool],
    patience: timedelta,
    asked: Callable[[BaseException], float] = lambda _: 0.0,
) -> T:
    """Call until it succeeds, fails for good or the patience ends, and return or raise what the last attempt did.

    Args:
        attempt: is given the seconds that are left, as the limit for its own time-outs.
        retryable: whether an error may pass with time.
        patience: for all attempts and the delays between them.
        asked: how many seconds the other side wishes to be left alone after this error; 0 where it does not say.
    """
    deadline = time.monotonic() + patience.total_seconds()
    spread = wait_random_exponential(multiplier=_FIRST_DELAY_S, max=_LONGEST_DELAY_S)

    def delay(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return spread(state) + (0.0 if error is None else min(asked(error), _LONGEST_WISH_S))

    retrying = Retrying(
        retry=retry_if_exception(retryable),
        wait=delay,
        stop=stop_before_delay(patience.total_seconds()),
        reraise=True,
    )
    return retrying(lambda: attempt(max(deadline - time.monotonic(), _SHORTEST_ATTEMPT_S)))
