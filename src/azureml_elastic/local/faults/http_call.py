"""One HTTP/1.1 call to a table as the fault-injecting proxy reads, forwards and answers it."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPMessage, parse_headers
from typing import BinaryIO
from urllib.parse import unquote

from azureml_elastic.local.faults.model import Lie, Trouble
from azureml_elastic.local.http_server import RequestRefused, read_body

_TABLE_TIMEOUT_S = 30.0
_LONGEST_LINE = 65536
_MAX_BODY = 16 << 20
"""Largest body in bytes; a table takes at most 4 MiB."""

# A proxy must not pass on headers that hold for one connection; the length is written anew.
_OF_THE_CONNECTION = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding"})
_PAGE = b"<html><head><title>%d</title></head><body><h1>Something stands in between</h1></body></html>"
_JSON = (("Content-Type", "application/json"),)
_NAMED = (("x-ms-version", "2019-02-02"), ("x-ms-request-id", "7"))
_ROW_IN_PATH = re.compile(r"RowKey='((?:[^']|'')*)'")


@dataclass(frozen=True)
class Request:
    """A request; ``target`` is the path with its query."""

    method: str
    target: str
    headers: HTTPMessage
    body: bytes

    @property
    def row(self) -> str:
        """Key of the row that the call is about, as written in the table; empty for several rows."""
        named = _ROW_IN_PATH.search(unquote(self.target.partition("?")[0]))
        if named is not None:
            return named[1].replace("''", "'")
        try:
            return str(json.loads(self.body)["RowKey"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""


@dataclass(frozen=True)
class Answer:
    """A response, without the headers that apply to one connection only."""

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def to_bytes(self) -> bytes:
        """Return the response as bytes on the wire."""
        lines = [f"HTTP/1.1 {self.status} {self.reason}", *(f"{name}: {value}" for name, value in self.headers)]
        if self.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


@dataclass(frozen=True)
class Exchange:
    """Record of one call through the proxy.

    Args:
        number: number of the call, from 1.
        time: end of the call in seconds since the epoch.
        row: key of the row as written in the table; empty for calls about several rows.
        trouble: injected fault, ``None`` for none.
        arrived: whether the call reached the table.
        status: HTTP status of the table's response, ``None`` without one.
        answered: whether the whole response was sent to the client.
    """

    number: int
    time: float
    method: str
    path: str
    row: str
    trouble: Trouble | None
    arrived: bool
    status: int | None
    answered: bool

    @property
    def written(self) -> bool:
        """Whether the table carried out a write."""
        done = self.status is not None and HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES
        return done and self.method != "GET"


_FOREIGN = (
    Answer(
        404,
        "Not Found",
        (("Content-Type", "application/xml"), ("x-ms-error-code", "ContainerNotFound"), *_NAMED),
        b'<?xml version="1.0" encoding="utf-8"?><Error><Code>ContainerNotFound</Code></Error>',
    ),
    Answer(400, "Bad Request", _JSON, b'{"error": "Required metadata header not specified"}'),
    Answer(401, "Unauthorized", (*_JSON, ("WWW-Authenticate", "Negotiate")), b'{"error": {"code": "Unauthorized"}}'),
    Answer(200, "OK", (("Content-Type", "text/plain"),), b"ok"),
    Answer(404, "Not Found", _JSON, b'{"detail": "Not Found"}'),
)
"""What other services answer: a blob store, a metadata service, a proxy that wants a login, two web servers."""


def read_request(reader: BinaryIO) -> Request | None:
    """Return the next request, ``None`` if the client has closed the connection.

    Raises:
        OSError: the connection is broken.
        RequestRefused: the request has no length that fits.
        ValueError, HTTPException: the bytes are not HTTP.
    """
    words = reader.readline(_LONGEST_LINE).decode("latin-1").split()
    if len(words) != 3:  # noqa: PLR2004 - method, target, version
        return None
    headers = parse_headers(reader)
    return Request(words[0], words[1], headers, read_body(headers, reader, _MAX_BODY))


def forward(request: Request, address: tuple[str, int]) -> Answer:
    """Send the request to the table on a new connection and return the response.

    Raises:
        OSError, HTTPException: the table does not respond.
    """
    with contextlib.closing(HTTPConnection(*address, timeout=_TABLE_TIMEOUT_S)) as table:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_THE_CONNECTION}
        table.request(request.method, request.target, request.body or None, headers)
        response = table.getresponse()
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _OF_THE_CONNECTION]
        return Answer(response.status, response.reason, tuple(kept), response.read())


def busy(retry_after_s: int) -> Answer:
    """Return Azure's response to a throttled call.

    Args:
        retry_after_s: value of ``Retry-After``, 0 for no such header.
    """
    headers = [("Content-Type", "application/json"), ("x-ms-error-code", "ServerBusy")]
    if retry_after_s:
        headers.append(("Retry-After", str(retry_after_s)))
    document = {"odata.error": {"code": "ServerBusy", "message": {"value": "The server is busy."}}}
    return Answer(503, "Server Busy", tuple(headers), json.dumps(document).encode())


def lie(kind: Lie, method: str, number: int) -> Answer | None:
    """Return a false answer, ``None`` where the table's own is given.

    Args:
        number: number of the call, by which other services take turns.
    """
    if kind == "refused":
        return None if method == "GET" else _refusal(412, "UpdateConditionNotSatisfied")
    if kind == "missing":
        return _refusal(404, "ResourceNotFound")
    if kind == "keyless":
        return Answer(200, "OK", (*_JSON, *_NAMED), json.dumps({"value": [{"number": 1}, {}], "number": 1}).encode())
    return _FOREIGN[number % len(_FOREIGN)]


def _refusal(status: int, code: str) -> Answer:
    document = {"odata.error": {"code": code, "message": {"value": "so says the table"}}}
    return Answer(status, "Refused", (*_JSON, *_NAMED, ("x-ms-error-code", code)), json.dumps(document).encode())


def refused(error: RequestRefused) -> Answer:
    """Return the response to a request that is not forwarded, after which the connection is closed."""
    headers = (("Connection", "close"), ("Content-Type", "text/plain"))
    return Answer(error.status, error.status.phrase, headers, str(error).encode())


def page(status: int) -> Answer:
    """Return an HTML page as from a gateway in between."""
    return Answer(status, "Gateway", (("Content-Type", "text/html"),), _PAGE % status)
