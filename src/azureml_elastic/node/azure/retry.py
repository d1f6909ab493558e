"""Retries of a network call within a time limit.

tenacity retries here, not azure-core's ``RetryPolicy``: that policy limits connecting but not reading by the time left,
sleeps for any ``Retry-After``, adds no jitter, and does not retry a POST (an insert) whose answer was lost.
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

__all__ = ["CALL_TIMEOUT", "retry"]

T = TypeVar("T")

CALL_TIMEOUT = timedelta(seconds=10)
"""Default time limit of one call, all attempts together."""

_FIRST_DELAY_S = 0.1  # upper bound of the first random delay; it doubles with each attempt
_LONGEST_DELAY_S = 2.0
_LONGEST_RETRY_AFTER_S = 5.0  # one answer must not use up the time limit
_SHORTEST_ATTEMPT_S = 0.1


def retry(
    attempt: Callable[[float], T],
    retryable: Callable[[BaseException], bool],
    timeout: timedelta,
    retry_after: Callable[[BaseException], float] = lambda _: 0.0,
) -> T:
    """Call until success, a permanent error or the time limit; return or raise the outcome of the last attempt.

    Args:
        attempt: call to make; receives the seconds left as the limit of its own timeouts.
        retryable: whether an error may be temporary.
        timeout: time limit of all attempts and the delays between them.
        retry_after: seconds to wait that the service requested with an error; 0 for none.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    jitter = wait_random_exponential(multiplier=_FIRST_DELAY_S, max=_LONGEST_DELAY_S)

    def delay(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return jitter(state) + (0.0 if error is None else min(retry_after(error), _LONGEST_RETRY_AFTER_S))

    retrying = Retrying(
        retry=retry_if_exception(retryable),
        wait=delay,
        stop=stop_before_delay(timeout.total_seconds()),
        reraise=True,
    )
    return retrying(lambda: attempt(max(deadline - time.monotonic(), _SHORTEST_ATTEMPT_S)))
