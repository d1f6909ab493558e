"""Requests for small JSON documents, over azure-core's transport and within a time limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from azureml_elastic.errors import MissingExtra, TableUnavailable, UsageError
from azureml_elastic.node.azure.retry import CALL_TIMEOUT, retry

try:
    from azure.core.credentials import TokenCredential
    from azure.core.exceptions import AzureError
    from azure.core.pipeline.transport import RequestsTransport
    from azure.core.rest import HttpRequest
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

__all__ = ["AzureError", "HttpRequest", "Reply", "fetch"]

_TIMEOUT_S = 4.0
_TRANSIENT = frozenset({408, 410, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Reply:
    """Final answer to a request.

    Args:
        status: HTTP status code.
        document: JSON document of the body, ``None`` if the body is not JSON.
        headers: headers by case-insensitive name.
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
        request: request to an ``http`` or ``https`` address.
        what: description of the requested resource, for error messages.
        token: credential to authorize the request with.
        scope: scope of the credential's token.
        direct: whether to bypass the proxies of the environment.
        timeout: time limit of all attempts.

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
