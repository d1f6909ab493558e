"""A stand-in for the Instance Metadata Service of the virtual machines of a scale set, with faults to inject.

One server on this machine plays the service of every machine of the set: each has an address of its own, at which it
learns its own name and sees the events of the whole set, as on Azure. What is played is described in
:mod:`azureml_elastic.node.preemption.scheduled_events`.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typing_extensions import Self

__all__ = ["MetadataService", "Trouble"]

_DRIP_SECONDS = 0.05
_EVENTS_VERSION = "2020-07-01"


@dataclass(frozen=True)
class Trouble:
    """What is wrong with the service; by default nothing.

    Args:
        status: to answer with instead of 200.
        body: to answer with instead of the document.
        delay: seconds before the answer.
        silent: never answer.
        dripping: send the answer's head byte by byte, without end.
        nameless: do not tell machines their names.
    """

    status: int = HTTPStatus.OK
    body: bytes | None = None
    delay: float = 0.0
    silent: bool = False
    dripping: bool = False
    nameless: bool = False


@dataclass(frozen=True)
class _Event:
    id: str
    type: str
    machines: tuple[str, ...]
    not_before: datetime
    duration: int
    started: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "EventId": self.id,
            "EventStatus": "Started" if self.started else "Scheduled",
            "EventType": self.type,
            "ResourceType": "VirtualMachine",
            "Resources": list(self.machines),
            "NotBefore": "" if self.started else format_datetime(self.not_before, usegmt=True),
            "EventSource": "Platform",
            "DurationInSeconds": self.duration,
        }


class _Book:
    """What the service knows and what it was asked, for several threads."""

    def __init__(self, first_delay: float, clock_offset: timedelta) -> None:
        self.trouble = Trouble()
        self.closed = threading.Event()
        self.requests: list[str] = []
        self.approved: list[str] = []
        self.most_open = 0
        self._first_delay = first_delay
        self._clock_offset = clock_offset
        self._open = 0
        self._lock = threading.Lock()
        self._events: dict[str, _Event] = {}
        self._incarnation = 1

    def now(self) -> datetime:
        return datetime.now(timezone.utc) + self._clock_offset

    def put(self, event: _Event) -> None:
        with self._lock:
            self._events[event.id] = event
            self._incarnation += 1

    def start(self, *events: str) -> bool:
        with self._lock:
            if not all(event in self._events for event in events):
                return False
            for event in events:
                self._events[event] = replace(self._events[event], started=True)
            self._incarnation += 1
            return True

    def remove(self, event: str) -> None:
        with self._lock:
            del self._events[event]
            self._incarnation += 1

    def document(self) -> bytes:
        with self._lock:
            events = [event.to_json() for event in self._events.values()]
            return json.dumps({"DocumentIncarnation": self._incarnation, "Events": events}).encode()

    def approve(self, body: bytes) -> bool:
        try:
            wanted = [str(request["EventId"]) for request in json.loads(body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return False
        if not self.start(*wanted):
            return False
        self.approved += wanted
        return True

    def begun(self, what: str) -> float:
        """Count a request and return for how long its answer is delayed."""
        with self._lock:
            first = what == "scheduledevents" and what not in self.requests
            self.requests.append(what)
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        return self.trouble.delay + (self._first_delay if first else 0.0)

    def over(self) -> None:
        with self._lock:
            self._open -= 1


class MetadataService:
    """The service, on a free port of this machine; a context manager.

    Args:
        first_delay: seconds that the first document takes, as the first request switches Azure's service on.
        clock_offset: by how much the service's clock is ahead of this machine's.
    """

    def __init__(self, *, first_delay: float = 0.0, clock_offset: timedelta = timedelta(0)) -> None:
        self._book = _Book(first_delay, clock_offset)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._server = _Server(self._book)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="metadata", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._book.closed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def address(self, machine: str) -> str:
        """Return the address at which a machine of this name finds its service."""
        assert self._server is not None, "the service does not run"
        return f"http://127.0.0.1:{self._server.server_address[1]}/{machine}/metadata"

    @property
    def trouble(self) -> Trouble:
        """What is wrong; may be changed at any time."""
        return self._book.trouble

    @trouble.setter
    def trouble(self, trouble: Trouble) -> None:
        self._book.trouble = trouble

    @property
    def documents(self) -> int:
        """How many documents were asked for."""
        return self._book.requests.count("scheduledevents")

    @property
    def most_at_once(self) -> int:
        """The most requests that were open at the same time."""
        return self._book.most_open

    @property
    def approved(self) -> tuple[str, ...]:
        """The events that machines have said may start, in order."""
        return tuple(self._book.approved)

    def announce(self, type_: str, *machines: str, notice: float = 30.0, duration: int = -1) -> str:
        """Schedule an event.

        Args:
            type_: ``Preempt``, ``Terminate``, ``Reboot``, ``Redeploy`` or ``Freeze``.
            machines: that it will happen to.
            notice: seconds until its earliest start; of a real preemption about 30.
            duration: seconds of the interruption, -1 for unknown.

        Returns:
            The event's id.
        """
        not_before = self._book.now() + timedelta(seconds=notice)
        event = _Event(secrets.token_hex(8), type_, machines, not_before, duration)
        self._book.put(event)
        return event.id

    def begin(self, event: str) -> None:
        """Let an event start."""
        self._book.start(event)

    def remove(self, event: str) -> None:
        """Take an event from the list: it is over, or has been given up."""
        self._book.remove(event)


class _Server(ThreadingHTTPServer):
    def __init__(self, book: _Book) -> None:
        self.book = book
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that hangs up is what its timeouts are for."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing: the nodes log what matters."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        del timestamp
        return format_datetime(self.server.book.now(), usegmt=True)

    def _serve(self, body: bytes | None) -> None:
        book = self.server.book
        parts = urlsplit(self.path)
        machine, _, path = parts.path.strip("/").partition("/")
        what = path.removeprefix("metadata/")
        try:
            book.closed.wait(book.begun(what))
            status, answer = self._answer(machine, what, parse_qs(parts.query), body)
        finally:
            book.over()
        if status is None:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _answer(
        self, machine: str, what: str, query: dict[str, list[str]], body: bytes | None
    ) -> tuple[int | None, bytes]:
        """Return the status and the body; no status: the connection ends without an answer."""
        book = self.server.book
        trouble = book.trouble
        if trouble.silent or trouble.dripping:
            while not book.closed.wait(_DRIP_SECONDS) and trouble is book.trouble and not self._hung_up():
                if trouble.dripping:
                    self.wfile.write(b"H")
            return None, b""
        if trouble.status != HTTPStatus.OK:
            return trouble.status, b'{"error": "as asked"}'
        if self.headers.get("Metadata", "").lower() != "true" or "api-version" not in query:
            return HTTPStatus.BAD_REQUEST, b'{"error": "the header Metadata or the api-version is missing"}'
        if what == "instance/compute/name" and body is None and not trouble.nameless:
            return HTTPStatus.OK, machine.encode()
        if what == "scheduledevents" and query["api-version"] == [_EVENTS_VERSION]:
            if body is None:
                return HTTPStatus.OK, book.document() if trouble.body is None else trouble.body
            return (HTTPStatus.OK if book.approve(body) else HTTPStatus.BAD_REQUEST), b""
        return HTTPStatus.NOT_FOUND, b'{"error": "not found"}'

    def _hung_up(self) -> bool:
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
