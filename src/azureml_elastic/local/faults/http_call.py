"""One HTTP/1.1 call to a table: read from a node, forwarded, answered, written down; for the proxy that disturbs it."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPMessage, parse_headers
from typing import BinaryIO
from urllib.parse import unquote

from azureml_elastic.local.faults.disturbance import Trouble

__all__ = ["Answer", "Exchange", "Request", "busy", "forward", "page", "read_request"]

_TABLE_TIMEOUT_S = 30.0
_LONGEST_LINE = 65536
_OF_THE_CONNECTION = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding"})
_PAGE = b"<html><head><title>%d</title></head><body><h1>Something stands in between</h1></body></html>"
_ROW_IN_PATH = re.compile(r"RowKey='((?:[^']|'')*)'")


@dataclass(frozen=True)
class Request:
    """A call; ``target`` is the path with its query."""

    method: str
    target: str
    headers: HTTPMessage
    body: bytes

    @property
    def row(self) -> str:
        """The key of the row that the call concerns, as it is written in the table; empty where it is no single one."""
        named = _ROW_IN_PATH.search(unquote(self.target.partition("?")[0]))
        if named is not None:
            return named[1].replace("''", "'")
        try:
            return str(json.loads(self.body)["RowKey"])
        except (ValueError, KeyError, TypeError):
            return ""


@dataclass(frozen=True)
class Answer:
    """An answer; the headers are without those that concern one connection only."""

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def to_bytes(self) -> bytes:
        """Return the answer as it goes over the wire."""
        lines = [f"HTTP/1.1 {self.status} {self.reason}", *(f"{name}: {value}" for name, value in self.headers)]
        if self.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


@dataclass(frozen=True)
class Exchange:
    """One call, as the proxy saw it.

    Args:
        number: among all calls, from 1.
        time: at its end, in seconds since the epoch.
        method: of HTTP.
        path: without the query.
        row: the row's key as it is written in the table, empty for calls that concern no single one.
        trouble: what happened to it, ``None`` where nothing did.
        arrived: whether it has reached the table.
        status: of the table's answer, ``None`` where there is none.
        answered: whether all of that answer was sent on.
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


def read_request(reader: BinaryIO) -> Request | None:
    """Return the next call, ``None`` where the client has hung up.

    Raises:
        OSError: the connection is broken.
        ValueError, HTTPException: this is no HTTP.
    """
    words = reader.readline(_LONGEST_LINE).decode("latin-1").split()
    if len(words) != 3:  # noqa: PLR2004 - method, target, version
        return None
    headers = parse_headers(reader)
    size = int(headers.get("Content-Length", 0))
    body = reader.read(size)
    return Request(words[0], words[1], headers, body) if len(body) == size else None


def forward(request: Request, address: tuple[str, int]) -> Answer:
    """Send the call on a connection of its own, which can never be a stale one.

    Args:
        request: the call.
        address: host and port of the table.

    Raises:
        OSError, HTTPException: the table does not answer.
    """
    with contextlib.closing(HTTPConnection(*address, timeout=_TABLE_TIMEOUT_S)) as table:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_THE_CONNECTION}
        table.request(request.method, request.target, request.body or None, headers)
        response = table.getresponse()
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _OF_THE_CONNECTION]
        return Answer(response.status, response.reason, tuple(kept), response.read())


def busy(retry_after_s: int) -> Answer:
    """Return what Azure answers to a call too many.

    Args:
        retry_after_s: 0 sends no ``Retry-After``.
    """
    headers = [("Content-Type", "application/json"), ("x-ms-error-code", "ServerBusy")]
    if retry_after_s:
        headers.append(("Retry-After", str(retry_after_s)))
    document = {"odata.error": {"code": "ServerBusy", "message": {"value": "The server is busy."}}}
    return Answer(503, "Server Busy", tuple(headers), json.dumps(document).encode())


def page(status: int) -> Answer:
    """Return an HTML page of some box in between."""
    return Answer(status, "Gateway", (("Content-Type", "text/html"),), _PAGE % status)
