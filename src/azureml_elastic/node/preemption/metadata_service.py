"""Requests to the Instance Metadata Service of Azure, each of which ends in time whatever the service does.

The service is plain HTTP on an address of the machine's own; proxies must not be asked (see "Azure Instance Metadata
Service" in Azure's documentation). ``urllib`` and ``http.client`` bound each read, not the whole exchange: a service
that sends a byte a second would hold them for ever. Here one deadline covers connecting, sending and reading.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "MetadataError", "call", "read_time"]

_LARGEST_BODY_BYTES = 1 << 20


class MetadataError(Exception):
    """The service gave no usable answer.

    Args:
        message: what was wrong.
        reached: whether something took the connection.
    """

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


@dataclass(frozen=True)
class Answer:
    """What the service answered with status 200.

    Args:
        body: body of the response.
        time: time of the response by the service's own clock, ``None`` if not sent.
    """

    body: bytes
    time: datetime | None


def call(address: str, path: str, *, timeout: float, connect_timeout: float, body: bytes | None = None) -> Answer:
    """Ask the service, bypassing any proxy.

    Args:
        address: address of the service, ``http://host[:port]/path``.
        path: below the address, with the query.
        timeout: seconds for the whole exchange.
        connect_timeout: seconds of these to connect in.
        body: body of a POST request; ``None`` for a GET request.

    Raises:
        MetadataError: nobody is there, the time is up, or the answer is none, too long, or of another status than 200.
    """
    until = time.monotonic() + timeout
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 80
    try:
        sock = socket.create_connection((host, port), min(connect_timeout, timeout))
    except OSError as error:
        raise MetadataError(f"{host}:{port} cannot be reached: {error}", reached=False) from error
    with sock:
        try:
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock.sendall(_request(parts.netloc, f"{parts.path}{path}", body))
            response = http.client.HTTPResponse(_Timed(sock, until))  # type: ignore[arg-type] # it makes a file only
            with response:
                response.begin()
                content = response.read(_LARGEST_BODY_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise MetadataError(
                f"{address}{path} gave no answer within {timeout:g} s: {words}", reached=True
            ) from error
    if response.status != http.client.OK:
        said = content[:200].decode(errors="replace")
        raise MetadataError(f"{address}{path} answered {response.status} {response.reason}: {said!r}", reached=True)
    if len(content) > _LARGEST_BODY_BYTES:
        raise MetadataError(f"{address}{path} answered more than {_LARGEST_BODY_BYTES} bytes", reached=True)
    return Answer(content, read_time(response.getheader("Date")))


def read_time(text: object) -> datetime | None:
    """Return a time as HTTP writes it (``Mon, 19 Sep 2016 18:29:47 GMT``), or as ISO 8601 does.

    Args:
        text: ISO 8601 time with an offset from UTC.

    Returns:
        ``None`` if it is no such text.
    """
    if not isinstance(text, str):
        return None
    for read in (parsedate_to_datetime, _from_iso):
        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
            time_ = read(text)
            if time_.tzinfo is not None:
                return time_
    return None


def _from_iso(text: str) -> datetime:
    return datetime.fromisoformat(text.strip().replace("Z", "+00:00"))


def _request(host: str, target: str, body: bytes | None) -> bytes:
    lines = [
        f"{'GET' if body is None else 'POST'} {target} HTTP/1.1",
        f"Host: {host}",
        "Metadata: true",
        "Accept: application/json, text/plain",
        "Connection: close",
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")


class _Timed(io.RawIOBase):
    """A socket to read from until a moment; in place of the socket for :class:`http.client.HTTPResponse`."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time is up")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)
