"""A fake Instance Metadata Service of the virtual machines of a scale set, with faults to inject.

One local server acts as the service of every machine of the set: each machine has its own address, which returns its
name and the events of the whole set, as on Azure. :mod:`azureml_elastic.node.preemption.scheduled_events` describes
the protocol.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from azureml_elastic.local.http_server import Handler, Server

_DRIP_SECONDS = 0.05
_EVENTS_VERSION = "2020-07-01"


@dataclass(frozen=True)
class MetadataFault:
    """Fault of the service; by default none.

    Args:
        status: HTTP status instead of 200.
        body: response body instead of the document.
        delay: seconds before the response.
        silent: whether the service never responds.
        dripping: whether the response's head is sent byte by byte, without end.
        nameless: whether machines cannot read their names.
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


class MetadataService(Server):
    """A thread-safe context manager that runs the service on a free port of this machine.

    Args:
        first_delay: delay of the first document in seconds; on Azure the first request enables the service.
        clock_offset: offset of the service's clock from this machine's.
    """

    def __init__(self, *, first_delay: float = 0.0, clock_offset: timedelta = timedelta(0)) -> None:
        super().__init__(_Handler)
        self.fault = MetadataFault()
        """Current fault; may be changed at any time."""
        self.closed = threading.Event()
        self.most_at_once = 0
        """Maximum number of requests that were open at the same time."""
        self._first_delay = first_delay
        self._clock_offset = clock_offset
        self._requests: list[str] = []
        self._at_once = 0
        self._events: dict[str, _Event] = {}
        self._incarnation = 1

    def __exit__(self, *exception: object) -> None:
        self.closed.set()  # first: requests that are held up end before their threads are waited for
        super().__exit__(*exception)

    def address(self, machine: str) -> str:
        """Return the service address of a machine."""
        return f"http://127.0.0.1:{self.server_address[1]}/{machine}/metadata"

    @property
    def documents(self) -> int:
        """Number of requested documents."""
        return self._requests.count("scheduledevents")

    def announce(self, type_: str, *machines: str, notice: float = 30.0, duration: int = -1) -> str:
        """Schedule an event and return its id.

        Args:
            type_: ``Preempt``, ``Terminate``, ``Reboot``, ``Redeploy`` or ``Freeze``.
            notice: seconds until the earliest start; about 30 for a real preemption.
            duration: expected interruption in seconds, -1 for unknown.
        """
        not_before = self.now() + timedelta(seconds=notice)
        event = _Event(secrets.token_hex(8), type_, machines, not_before, duration)
        with self._lock:
            self._events[event.id] = event
            self._incarnation += 1
        return event.id

    def begin(self, event: str) -> None:
        """Start an event."""
        with self._lock:
            self._events[event] = replace(self._events[event], started=True)
            self._incarnation += 1

    def remove(self, event: str) -> None:
        """Remove an event that is over or was cancelled."""
        with self._lock:
            del self._events[event]
            self._incarnation += 1

    # --- for the request handlers ------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the time by the service's clock."""
        return datetime.now(timezone.utc) + self._clock_offset

    def document(self) -> bytes:
        """Return the document with all events."""
        with self._lock:
            events = [event.to_json() for event in self._events.values()]
            return json.dumps({"DocumentIncarnation": self._incarnation, "Events": events}).encode()

    @contextlib.contextmanager
    def request(self, resource: str) -> Iterator[None]:
        """Count a request as long as the context is open, and delay its response."""
        with self._lock:
            first = resource == "scheduledevents" and resource not in self._requests
            self._requests.append(resource)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            # The end of the service ends the delay.
            self.closed.wait(self.fault.delay + (self._first_delay if first else 0.0))
            yield
        finally:
            with self._lock:
                self._at_once -= 1


class _Handler(Handler):
    server: MetadataService

    def do_GET(self) -> None:  # noqa: N802 - the base class's name
        if self.read_body() is not None:
            self._serve()

    def date_time_string(self, timestamp: float | None = None) -> str:
        # Nodes measure by this header how much time a notice leaves, whatever their own clock says.
        del timestamp
        return format_datetime(self.server.now(), usegmt=True)

    def _serve(self) -> None:
        try:
            parts = urlsplit(self.path)
        except ValueError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, f"The target is not a URL: {error}")
            return
        machine, _, path = parts.path.strip("/").partition("/")
        resource = path.removeprefix("metadata/")
        with self.server.request(resource):
            status, answer = self._answer(machine, resource, parse_qs(parts.query))
        if status is None:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _answer(self, machine: str, resource: str, query: dict[str, list[str]]) -> tuple[int | None, bytes]:
        """Return the status and the body; ``None`` as status closes the connection without a response."""
        service, fault = self.server, self.server.fault
        if fault.silent or fault.dripping:
            # A fault that was replaced holds nobody up any more.
            while not service.closed.wait(_DRIP_SECONDS) and fault is service.fault and not self._hung_up():
                if fault.dripping:
                    self.wfile.write(b"H")
            return None, b""
        if fault.status != HTTPStatus.OK:
            return fault.status, b'{"error": "injected"}'
        if self.headers.get("Metadata", "").lower() != "true" or "api-version" not in query:
            return HTTPStatus.BAD_REQUEST, b'{"error": "the header Metadata or the api-version is missing"}'
        if resource == "instance/compute/name" and not fault.nameless:
            return HTTPStatus.OK, machine.encode()
        if resource == "scheduledevents" and query["api-version"] == [_EVENTS_VERSION]:
            return HTTPStatus.OK, service.document() if fault.body is None else fault.body
        return HTTPStatus.NOT_FOUND, b'{"error": "not found"}'

    def _hung_up(self) -> bool:
        try:
            # A look without reading: what follows may be the next request.
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
