"""Azure's scheduled events: announcements of what will happen to this virtual machine.

See "Azure Metadata Service: Scheduled Events for Linux VMs" in Azure's documentation, api-version 2020-07-01. ``GET
/metadata/scheduledevents`` returns ``{"DocumentIncarnation": n, "Events": [...]}`` with the events of *all* machines of
a scale set or availability set, each with the names of its machines in ``Resources``. An event is ``Scheduled``, then
``Started``; once it is over or withdrawn, it is no longer listed. The first request enables the service and may take
two minutes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from azureml_elastic.node.preemption.metadata_service import Answer, MetadataError, call, read_time
from azureml_elastic.node.preemption.notices import Announcement, PolledSource

_LOG = logging.getLogger(__name__)

_EVENTS = "/scheduledevents?api-version=2020-07-01"
_NAME = "/instance/compute/name?api-version=2021-02-01&format=text"

_LEAD_SECONDS = 120.0
"""Time before the start of an event at which a node leaves; one other than ``Preempt`` may be announced days ahead."""

_RESTARTS = ("Reboot", "Redeploy")
_LEAVING = ("Preempt", "Terminate", *_RESTARTS)


@dataclass(frozen=True)
class ScheduledEvent:
    """Event of the document.

    Args:
        type: ``Preempt``, ``Terminate``, ``Reboot``, ``Redeploy``, ``Freeze`` or an unknown type.
        status: ``Scheduled`` or ``Started``.
        not_before: earliest start; ``None`` once it has started.
        duration: duration of an interruption in seconds; ``None`` if unknown.
    """

    id: str
    type: str
    status: str
    resources: tuple[str, ...]
    not_before: datetime | None = None
    duration: float | None = None

    @property
    def started(self) -> bool:
        """Whether it has started or happened."""
        return self.status == "Started"


def read_document(body: bytes) -> list[ScheduledEvent]:
    """Return the valid events of a document.

    Raises:
        ValueError: the document is invalid.
    """
    document = json.loads(body)
    entries = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it has no list of Events")  # noqa: TRY004 - one type for all errors of the document
    return [event for entry in entries if (event := _read_event(entry)) is not None]


def concerns(event: ScheduledEvent, name: str | None, host_name: str) -> bool:
    """Return whether an event concerns this machine.

    Args:
        name: Azure's name of this machine, ``None`` if unknown.
        host_name: host name of this machine, which replaces an unknown name for events of one machine only: a run
            would end if all its machines took the event of another one for their own.
    """
    names = [resource.casefold() for resource in event.resources]
    if name is not None:
        return name.casefold() in names
    return names == [host_name.casefold()]


def seconds_left(event: ScheduledEvent, now: datetime) -> float | None:
    """Return the seconds until the event may start, by the service's clock, ``None`` if unknown."""
    return None if event.not_before is None or event.started else (event.not_before - now).total_seconds()


def leave_announcements(
    events: Iterable[ScheduledEvent], *, name: str | None, host_name: str, now: datetime, past: set[str]
) -> dict[str, Announcement]:
    """Return announcements of the events for which this node must leave now, by event id.

    Args:
        name: Azure's name of this machine, see :func:`concerns`.
        host_name: see :func:`concerns`.
        now: see :func:`seconds_left`.
        past: ids of events that have already taken effect on this machine.
    """
    found = {}
    for event in events:
        if event.type not in _LEAVING or event.id in past or not concerns(event, name, host_name):
            continue
        left = seconds_left(event, now)
        if event.type == "Preempt" or left is None or left <= _LEAD_SECONDS:
            found[event.id] = Announcement(f"scheduled event {event.type} {event.id}", left)
    return found


@dataclass(frozen=True)
class MetadataTimeouts:
    """Timeouts of the metadata service in seconds, and the number of attempts."""

    connect: float = 2.0  # of a connection; the service is on the same host
    first: float = 150.0  # of the first response, because the first request enables the service
    request: float = 5.0  # of later responses
    name: float = 2.0  # of the machine's name
    attempts: int = 3  # failures to connect after which the service counts as absent
    rarely: float = 60.0  # interval between two requests to an absent service
    longest: float = 10.0  # longest pause between two requests to a service that fails


class ScheduledEvents(PolledSource):
    """Client that polls the scheduled events. While the service fails, the last document remains valid.

    Args:
        announce: callback for each document, with the events for which this node must leave.
    """

    def __init__(
        self,
        address: str,
        announce: Callable[[Mapping[str, Announcement]], None],
        *,
        host_name: str,
        interval: float = 1.0,
        timeouts: MetadataTimeouts | None = None,
    ) -> None:
        super().__init__("scheduled-events", announce, interval)
        self._address = address
        self._host_name = host_name
        self._timeouts = timeouts or MetadataTimeouts()
        self._name: str | None = None
        self._answered = False
        self._unreached = 0
        self._failures = 0
        self._past: set[str] = set()
        self._logged: set[tuple[str, str]] = set()

    def poll(self) -> float:
        """Request the document once and return the seconds until the next request."""
        try:
            answer = self._call(_EVENTS, self._timeouts.request if self._answered else self._timeouts.first)
            events = read_document(answer.body)
        except MetadataError as error:
            return self._failed(str(error), reached=error.reached)
        except (ValueError, RecursionError) as error:
            return self._failed(f"the answer of {self._address} is no document: {error}", reached=True)
        if not self._answered:
            # A restart stays listed for minutes after the machine is up again, with this node on it.
            self._past = {event.id for event in events if event.started and event.type in _RESTARTS}
            _LOG.debug("Watching the scheduled events of %s.", self._address)
        elif self._failures:
            _LOG.info("The metadata service %s answers again.", self._address)
        self._answered, self._failures, self._unreached = True, 0, 0
        self._read_name()
        self._past &= {event.id for event in events}
        self._log(events)
        # Times of events are those of the service; this machine's clock may be off by more than a notice is long.
        now, name, host_name = answer.time or datetime.now(timezone.utc), self._name, self._host_name
        leaving = leave_announcements(events, name=name, host_name=host_name, now=now, past=self._past)
        self._announce(leaving)
        return self._interval

    def _call(self, path: str, timeout: float) -> Answer:
        return call(self._address, path, timeout=timeout, connect_timeout=self._timeouts.connect)

    def _read_name(self) -> None:
        if self._name is None:
            try:
                name = self._call(_NAME, self._timeouts.name).body.decode().strip()
            except (MetadataError, UnicodeDecodeError) as error:
                _LOG.debug("This machine's name cannot be read now: %s", error)
            else:
                self._name = name or None

    def _failed(self, message: str, *, reached: bool) -> float:
        """Count a failure and return the pause after it."""
        timeouts = self._timeouts
        self._failures += 1
        self._unreached = 0 if reached else self._unreached + 1
        if not self._answered and self._unreached >= timeouts.attempts:
            if self._unreached == timeouts.attempts:
                _LOG.info("No scheduled events: there is no metadata service (%s).", message)
            return max(timeouts.rarely, self._interval)
        if self._failures == timeouts.attempts and (self._answered or reached):
            _LOG.warning("The metadata service fails; scheduled events may go unnoticed. %s", message)
        else:
            _LOG.debug("%s", message)
        return max(self._interval, min(timeouts.longest, self._interval * 2.0 ** min(self._failures - 1, 16)))

    def _log(self, events: Iterable[ScheduledEvent]) -> None:
        """Log new events of this machine."""
        seen = set()
        for event in events:
            if event.type in _LEAVING and self._name is None and not concerns(event, None, self._host_name):
                words = "is ignored, because this machine's name is unknown"
            elif not concerns(event, self._name, self._host_name):
                continue
            elif event.type == "Freeze":
                lasting = "for an unknown time" if event.duration is None else f"for about {event.duration:g} s"
                words = f"will stop this machine {lasting}; the node stays"
            elif event.id in self._past:
                words = "happened before this node started"
            else:
                when = "now" if event.not_before is None else f"not before {event.not_before:%Y-%m-%d %H:%M:%S %Z}"
                words = f"will happen to this machine, {when}"
            seen.add((event.id, event.status))
            if (event.id, event.status) not in self._logged:
                _LOG.warning("The scheduled event %s %s (%s) %s.", event.type, event.id, event.status, words)
        self._logged = seen


def _read_event(entry: Any) -> ScheduledEvent | None:
    if not isinstance(entry, dict):
        return None
    id_, type_, resources = entry.get("EventId"), entry.get("EventType"), entry.get("Resources")
    if not (isinstance(id_, str) and id_ and isinstance(type_, str) and isinstance(resources, list)):
        return None
    duration = entry.get("DurationInSeconds")
    return ScheduledEvent(
        id=id_,
        type=type_,
        status=str(entry.get("EventStatus")),
        resources=tuple(str(resource) for resource in resources),
        not_before=read_time(entry.get("NotBefore")),
        duration=float(duration) if isinstance(duration, int | float) and duration >= 0 else None,
    )
