"""One small JSON document over HTTP, with bounded patience: tokens from the node, the workspace from Azure."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from email.message import Message
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from azureml_elastic.errors import TableUnavailable, UsageError
from azureml_elastic.node.azure.retry import PATIENCE, repeat

__all__ = ["Reply", "exchange", "fetch"]

_TIMEOUT_S = 4.0
_TRANSIENT = frozenset({408, 410, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Reply:
    """A final answer.

    Args:
        status: of HTTP.
        document: the JSON document, ``None`` where the answer is none.
        headers: by their names in lower case.
    """

    status: int
    document: Any
    headers: Mapping[str, str]


def fetch(request: Request, what: str, *, direct: bool = False, patience: timedelta = PATIENCE) -> tuple[int, Any]:
    """Return the status and the document that :func:`exchange` gets; takes what that takes, and raises the same."""
    reply = exchange(request, what, direct=direct, patience=patience)
    return reply.status, reply.document


def exchange(request: Request, what: str, *, direct: bool = False, patience: timedelta = PATIENCE) -> Reply:
    """Send a request and return the final answer.

    Throttling, server errors and broken connections are waited out while the patience lasts.

    Args:
        request: to an ``http`` or ``https`` address.
        what: is fetched, for the messages.
        direct: past the environment's proxies, for addresses on this machine.
        patience: for all attempts together.

    Raises:
        UsageError: the address is not of HTTP.
        TableUnavailable: no final answer in time.
    """
    place = urlsplit(request.full_url)
    address = f"{place.scheme}://{place.netloc}{place.path}"  # the query stays out of the messages
    if place.scheme not in ("http", "https") or not place.netloc:
        raise UsageError(f"The address {address!r} for {what} is no HTTP address. Correct the variable that holds it.")
    opener = build_opener(_NoRedirect, ProxyHandler({})) if direct else build_opener(_NoRedirect)

    def attempt(left_s: float) -> Reply:
        try:
            status, body, headers = _send(opener, request, min(_TIMEOUT_S, left_s))
        except (OSError, http.client.HTTPException) as error:
            raise TableUnavailable(
                f"{address} does not answer the request for {what}: {error}. It may be repeated."
            ) from error
        if status in _TRANSIENT:
            raise TableUnavailable(f"{address} is busy (HTTP {status}) and does not give {what}. It may be repeated.")
        try:
            return Reply(status, json.loads(body), headers)
        except ValueError:
            return Reply(status, None, headers)

    return repeat(attempt, lambda error: isinstance(error, TableUnavailable), patience)


class _NoRedirect(HTTPRedirectHandler):
    """Follows nobody to another address: the request may carry a token, which is for this one alone."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request."""


def _send(opener: OpenerDirector, request: Request, timeout_s: float) -> tuple[int, bytes, dict[str, str]]:
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return response.status, response.read(), _lowered(response.headers)
    except HTTPError as error:
        with error:
            return error.code, error.read(), _lowered(error.headers)


def _lowered(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
