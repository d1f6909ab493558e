"""Requests for small JSON documents over azure-core's transport, and retries of a network call within a time limit.

The retries are not those of azure-core's ``RetryPolicy``: that policy limits connecting but not reading by the time
left, sleeps for any ``Retry-After``, adds no jitter, and does not retry a POST (an insert) whose answer was lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from azureml_elastic.errors import MissingExtra, TableUnavailable, UsageError

__all__ = ["CALL_TIMEOUT", "AzureError", "HttpRequest", "Reply", "fetch", "retry"]

try:
    from azure.core.credentials import TokenCredential
    from azure.core.exceptions import AzureError
    from azure.core.pipeline.transport import RequestsTransport
    from azure.core.rest import HttpRequest
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

T = TypeVar("T")

CALL_TIMEOUT = timedelta(seconds=10)
"""Default time limit of one call, all attempts together."""

_FIRST_DELAY_S = 0.1  # upper bound of the first random delay; it doubles with each attempt
_LONGEST_DELAY_S = 2.0
_LONGEST_RETRY_AFTER_S = 5.0  # one answer must not use up the time limit
_SHORTEST_ATTEMPT_S = 0.1
_TIMEOUT_S = 4.0  # of one attempt of a request
_TRANSIENT = frozenset({408, 410, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Reply:
    """Final answer to a request.

    Args:
        document: JSON document of the body, ``None`` if the body is not JSON.
    """

    status: int
    document: Any
    headers: Mapping[str, str]


def fetch(
    request: HttpRequest,
    what: str,
    *,
    token: TokenCredential | None = None,
    scope: str = "",
    direct: bool = False,
    timeout: timedelta = CALL_TIMEOUT,
) -> Reply:
    """Send a request and return the final answer.

    Throttling, server errors and broken connections are retried. Redirects are not followed: a token is sent to the
    requested address only.

    Args:
        what: description of the requested resource, for error messages.
        direct: whether to bypass the proxies of the environment.

    Raises:
        UsageError: the address is not an HTTP address.
        TableUnavailable: there is no final answer within the time limit.
    """
    url = urlsplit(request.url)
    address = f"{url.scheme}://{url.netloc}{url.path}"  # without the query, which may contain a secret
    if url.scheme not in ("http", "https") or not url.netloc:
        raise UsageError(f"The address {address!r} for {what} is no HTTP address. Correct the variable that holds it.")
    if token is not None:
        request.headers["Authorization"] = f"Bearer {token.get_token(scope).token}"

    def attempt(left_s: float) -> Reply:
        limit = min(_TIMEOUT_S, left_s)
        try:
            response = transport.send(request, connection_timeout=limit, read_timeout=limit)
        except AzureError as error:
            reason = str(error).replace(url.query, "…") if url.query else str(error)
            text = f"{address} does not answer the request for {what}: {reason}. It may be repeated."
            raise TableUnavailable(text) from None  # the SDK's error contains the query
        if response.status_code in _TRANSIENT:
            raise TableUnavailable(
                f"{address} is busy (HTTP {response.status_code}) and does not give {what}. It may be repeated."
            )
        try:
            document = response.json()
        except (ValueError, AzureError):
            document = None
        return Reply(response.status_code, document, response.headers)

    with RequestsTransport(use_env_settings=not direct) as transport:
        return retry(attempt, lambda error: isinstance(error, TableUnavailable), timeout)


def retry(
    attempt: Callable[[float], T],
    retryable: Callable[[BaseException], bool],
    timeout: timedelta,
    retry_after: Callable[[BaseException], float] = lambda _: 0.0,
) -> T:
    """Call until success, a permanent error or the time limit; return or raise the outcome of the last attempt.

    Args:
        attempt: call to make; receives the seconds left as the limit of its own timeouts.
        retry_after: seconds to wait that the service requested with an error; 0 for none.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    longest_delay = _FIRST_DELAY_S
    while True:
        try:
            return attempt(max(deadline - time.monotonic(), _SHORTEST_ATTEMPT_S))
        except BaseException as error:
            if not retryable(error):
                raise
            # Random, so that nodes that were throttled together do not come back together.
            delay = random.uniform(0, longest_delay) + min(retry_after(error), _LONGEST_RETRY_AFTER_S)
            if time.monotonic() + delay >= deadline:
                raise
        time.sleep(delay)
        longest_delay = min(2 * longest_delay, _LONGEST_DELAY_S)
