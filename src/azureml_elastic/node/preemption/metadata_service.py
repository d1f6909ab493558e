"""Requests to Azure's Instance Metadata Service, with one deadline for connecting, sending and reading.

The service is plain HTTP at an address of the machine and must be called without a proxy (see "Azure Instance Metadata
Service" in Azure's documentation). The timeouts of ``http.client`` limit single reads only: a service that sends a byte
per second would block it for ever.
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

_LARGEST_BODY_BYTES = 1 << 20


class MetadataError(Exception):
    """The service gave no usable answer; ``reached`` is whether it accepted the connection."""

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


@dataclass(frozen=True)
class Answer:
    """Response with status 200, and its time by the service's own clock, if sent."""

    body: bytes
    time: datetime | None


def call(address: str, path: str, *, timeout: float, connect_timeout: float) -> Answer:
    """Send a request to the service, bypassing any proxy.

    Args:
        address: address of the service, ``http://host[:port]/path``.
        path: path below the address, with the query.

    Raises:
        MetadataError: the service is unreachable, late, or sends an invalid or too long response or another status.
    """
    until = time.monotonic() + timeout
    parts = urlsplit(address)
    host, port, url = parts.hostname or "", parts.port or 80, f"{address}{path}"
    try:
        sock = socket.create_connection((host, port), min(connect_timeout, timeout))
    except OSError as error:
        raise MetadataError(f"{host}:{port} cannot be reached: {error}", reached=False) from error
    connection = http.client.HTTPConnection(parts.netloc)
    connection.sock = _DeadlineSocket(sock, until)
    headers = {"Metadata": "true", "Accept": "application/json, text/plain", "Connection": "close"}
    with contextlib.closing(sock):
        try:
            connection.request("GET", f"{parts.path}{path}", headers=headers)
            with connection.getresponse() as response:
                content = response.read(_LARGEST_BODY_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise MetadataError(f"{url} gave no answer within {timeout:g} s: {reason}", reached=True) from error
    if response.status != http.client.OK:
        text = content[:200].decode(errors="replace")
        raise MetadataError(f"{url} answered {response.status} {response.reason}: {text!r}", reached=True)
    if len(content) > _LARGEST_BODY_BYTES:
        raise MetadataError(f"{url} answered more than {_LARGEST_BODY_BYTES} bytes", reached=True)
    return Answer(content, read_time(response.getheader("Date")))


def read_time(text: object) -> datetime | None:
    """Parse a time with an offset, as HTTP or ISO 8601 write it; return ``None`` for any other value."""
    if isinstance(text, str):
        for read in (parsedate_to_datetime, _from_iso):
            with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
                if (found := read(text)).tzinfo is not None:
                    return found
    return None


def _from_iso(text: str) -> datetime:
    return datetime.fromisoformat(text.strip().replace("Z", "+00:00"))


class _DeadlineSocket(io.RawIOBase):
    """The socket of an :class:`http.client.HTTPConnection`, with a deadline for all its operations together."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._limit()
        return self._sock.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        self._limit()
        self._sock.sendall(data)

    def _limit(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time limit is reached")
        self._sock.settimeout(left)
