"""Scheduled events, against a real server: relevant events, and failures of the service."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from azureml_elastic.local.faults.metadata_service import MetadataFault, MetadataService
from azureml_elastic.node.preemption.metadata_service import MetadataError, call, read_time
from azureml_elastic.node.preemption.scheduled_events import (
    MetadataTimeouts,
    ScheduledEvent,
    ScheduledEvents,
    concerns,
    leave_announcements,
    read_document,
    seconds_left,
)
from tests.support.listening import silent_port

GENEROUS = MetadataTimeouts(connect=30.0, first=60.0, request=60.0, name=60.0, attempts=3, rarely=40.0, longest=10.0)
NOW = datetime(2026, 4, 11, 22, 26, 28, tzinfo=timezone.utc)


class Watched:
    """A watch that is asked by hand, and what it has announced."""

    def __init__(self, address, host_name="host", **options):
        self.said = []
        self.watch = ScheduledEvents(
            address, self.said.append, host_name=host_name, **{"timeouts": GENEROUS, "interval": 0.5, **options}
        )

    def poll(self):
        return self.watch.poll()

    @property
    def reasons(self):
        return [announcement.reason for announcement in self.said[-1].values()]


@pytest.fixture
def service():
    with MetadataService() as running:
        yield running


@pytest.fixture
def watched(service):
    return Watched(service.address("set_1"))


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_these_events_make_the_machine_that_they_name_leave(service, watched, kind):
    watched.poll()
    assert watched.said == [{}]
    event = service.announce(kind, "SET_1", "set_2")
    watched.poll()
    assert watched.reasons == [f"scheduled event {kind} {event}"]
    (announcement,) = watched.said[-1].values()
    assert 20 < announcement.seconds_left <= 30
    service.begin(event)
    watched.poll()
    assert watched.reasons == [f"scheduled event {kind} {event}"]
    service.remove(event)
    watched.poll()
    assert watched.said[-1] == {}


@pytest.mark.parametrize("nameless", [False, True])
def test_a_neighbour_s_event_never_counts(service, watched, nameless, caplog):
    service.fault = MetadataFault(nameless=nameless)
    for event in (("Preempt", "set_2"), ("Preempt", "set_11", "set_2"), ("Terminate", "set_2")):
        service.announce(*event)
    watched.poll()
    watched.poll()
    assert watched.said == [{}, {}]
    assert caplog.text.count("this machine's name is unknown") == (3 if nameless else 0)


def test_a_machine_without_a_known_name_goes_by_its_own(service):
    service.fault = MetadataFault(nameless=True)
    watched = Watched(service.address("Alone"), host_name="alone")
    event = service.announce("Preempt", "Alone")
    service.announce("Preempt", "alone", "other")
    watched.poll()
    assert watched.reasons == [f"scheduled event Preempt {event}"]
    service.fault = MetadataFault()
    watched.poll()
    assert len(watched.reasons) == 2


@pytest.mark.parametrize("kind", ["Freeze", "Upgrade"])
def test_a_freeze_and_what_is_not_known_do_not_count(service, watched, kind, caplog):
    service.announce(kind, "set_1", duration=9)
    for _ in range(3):
        watched.poll()
    assert watched.said == [{}, {}, {}]
    assert caplog.text.count("will stop this machine for about 9 s") == (1 if kind == "Freeze" else 0)


def test_only_a_preemption_makes_a_machine_leave_long_before(service, watched):
    later = service.announce("Redeploy", "set_1", notice=7 * 86_400)
    sooner = service.announce("Terminate", "set_1", notice=119)
    spot = service.announce("Preempt", "set_1", notice=7 * 86_400)
    watched.poll()
    assert set(watched.said[-1]) == {sooner, spot}
    service.begin(later)
    watched.poll()
    assert set(watched.said[-1]) == {later, sooner, spot}


def test_a_restart_that_lies_behind_this_node_does_not_count(service, watched, caplog):
    behind = service.announce("Reboot", "set_1")
    spot = service.announce("Preempt", "set_1")
    service.begin(behind)
    service.begin(spot)
    watched.poll()
    assert set(watched.said[-1]) == {spot}
    assert "happened before this node started" in caplog.text
    again = service.announce("Reboot", "set_1")
    service.begin(again)
    watched.poll()
    assert set(watched.said[-1]) == {spot, again}


@pytest.mark.parametrize("hours", [-30, 30])
def test_two_clocks_are_never_compared(hours):
    with MetadataService(clock_offset=timedelta(hours=hours)) as service:
        watched = Watched(service.address("vm"))
        service.announce("Terminate", "vm", notice=100)
        watched.poll()
        (announcement,) = watched.said[-1].values()
        assert 90 < announcement.seconds_left <= 100
        service.announce("Terminate", "vm", notice=3600)
        watched.poll()
        assert len(watched.said[-1]) == 1


def test_the_first_answer_may_take_its_time():
    with MetadataService(first_delay=2.0) as service:
        event = service.announce("Preempt", "vm")
        watched = Watched(service.address("vm"), timeouts=replace(GENEROUS, request=0.5))
        began = time.monotonic()
        watched.watch.start()
        while not watched.said:
            assert time.monotonic() - began < 60
            time.sleep(0.01)
        watched.watch.stop()
        assert watched.reasons == [f"scheduled event Preempt {event}"]
        assert service.most_at_once == 1


def test_the_first_answer_is_not_waited_for():
    with MetadataService(first_delay=60.0) as service:
        watched = Watched(service.address("vm"))
        began = time.monotonic()
        watched.watch.start()
        assert time.monotonic() - began < 30
        watched.watch.stop()


BAD = {
    "status 500": MetadataFault(status=500),
    "status 429": MetadataFault(status=429),
    "redirect": MetadataFault(status=302),
    "not json": MetadataFault(body=b"<html>"),
    "empty": MetadataFault(body=b""),
    "not utf-8": MetadataFault(body=b"\xff\xfe\xff"),
    "a list": MetadataFault(body=b"[]"),
    "no events": MetadataFault(body=b'{"DocumentIncarnation": 3}'),
    "nested": MetadataFault(body=b'{"Events":' * 20_000),
    "huge": MetadataFault(body=b" " * (3 << 20)),
    "silent": MetadataFault(silent=True),
    "dripping": MetadataFault(dripping=True),
    "slow": MetadataFault(delay=60.0),
}


@pytest.mark.parametrize("fault", BAD.values(), ids=BAD.keys())
def test_a_bad_answer_changes_nothing_and_takes_no_longer_than_its_time(service, watched, fault):
    event = service.announce("Preempt", "set_1")
    watched.poll()
    service.fault = fault
    watched.watch._timeouts = replace(GENEROUS, request=0.3)
    pauses = []
    for _ in range(3):
        began = time.monotonic()
        pauses.append(watched.poll())
        assert time.monotonic() - began < 30
    assert pauses == [0.5, 1.0, 2.0]  # it is not pressed while it is not well
    assert len(watched.said) == 1
    service.fault = MetadataFault()
    watched.watch._timeouts = GENEROUS
    assert watched.poll() == 0.5
    assert watched.reasons == [f"scheduled event Preempt {event}"]


def test_requests_to_a_service_that_hangs_never_pile_up(service):
    service.fault = MetadataFault(silent=True)
    watched = Watched(
        service.address("vm"), interval=0.01, timeouts=MetadataTimeouts(first=0.2, request=0.2, longest=0.02)
    )
    watched.watch.start()
    while service.documents < 5:
        time.sleep(0.01)
    watched.watch.stop()
    assert service.most_at_once <= 2  # the server learns that the client has hung up a moment later


def test_without_a_service_there_are_no_warnings(caplog):
    caplog.set_level(logging.INFO)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        watched = Watched(f"http://127.0.0.1:{probe.getsockname()[1]}/metadata")
        pauses = [watched.poll() for _ in range(5)]
    assert pauses == [0.5, 1.0, 40.0, 40.0, 40.0]
    assert watched.said == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no metadata service" in caplog.text


def test_a_service_that_drops_connections_is_given_up_by_the_time_to_connect():
    with silent_port() as port:
        began = time.monotonic()
        with pytest.raises(MetadataError) as caught:
            call(f"http://127.0.0.1:{port}", "/x", timeout=60.0, connect_timeout=0.4)
        assert time.monotonic() - began < 30
        assert not caught.value.reached


def test_no_proxy_is_asked(service, watched, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    watched.poll()
    assert watched.said == [{}]


def test_the_service_requires_the_header(service):
    with socket.create_connection(("127.0.0.1", int(service.address("x").split(":")[2].split("/")[0])), 5) as sock:
        sock.sendall(b"GET /x/metadata/scheduledevents?api-version=2020-07-01 HTTP/1.0\r\n\r\n")
        assert b" 400 " in sock.makefile("rb").readline()
    with pytest.raises(MetadataError, match="404"):
        call(service.address("vm"), "/other?api-version=2020-07-01", timeout=60, connect_timeout=60)


def test_a_document_is_read_as_far_as_it_can_be():
    body = b"""{"DocumentIncarnation": 2, "Events": [
        {"EventId": "a", "EventStatus": "Scheduled", "EventType": "Freeze", "ResourceType": "VirtualMachine",
         "Resources": ["WestNO_0", "WestNO_1"], "NotBefore": "Sat, 11 Apr 2026 22:26:58 GMT",
         "Description": "paused", "EventSource": "Platform", "DurationInSeconds": 5},
        "nonsense", {"EventId": "b"}, {"EventId": 3, "EventType": "Preempt", "Resources": []},
        {"EventId": "c", "EventStatus": "Started", "EventType": "Preempt", "Resources": ["x"], "NotBefore": "",
         "DurationInSeconds": -1}]}"""
    assert read_document(body) == [
        ScheduledEvent("a", "Freeze", "Scheduled", ("WestNO_0", "WestNO_1"), NOW + timedelta(seconds=30), 5.0),
        ScheduledEvent("c", "Preempt", "Started", ("x",)),
    ]
    assert read_document(b'{"DocumentIncarnation": 1, "Events": []}') == []
    for wrong in (b"", b"{", b"[]", b'{"Events": {}}'):
        with pytest.raises(ValueError, match=r".*"):
            read_document(wrong)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Sat, 11 Apr 2026 22:26:28 GMT", NOW),
        ("2026-04-11T22:26:28Z", NOW),
        ("2026-04-11T22:26:28", None),
        ("", None),
        ("soon", None),
        ("99999999999999999999", None),
        (None, None),
        (7, None),
    ],
)
def test_times(text, read):
    assert read_time(text) == read


def test_decisions():
    event = ScheduledEvent("e", "Terminate", "Scheduled", ("a",), NOW + timedelta(seconds=120))
    assert seconds_left(event, NOW) == 120
    assert concerns(event, "A", "b")
    assert not concerns(event, "b", "a")
    assert concerns(event, None, "A")
    one = {"name": "a", "host_name": "", "past": set()}
    assert leave_announcements([event], now=NOW - timedelta(seconds=1), **one) == {}
    assert leave_announcements([event], now=NOW, **one).keys() == {"e"}
    assert leave_announcements([event], now=NOW, **{**one, "past": {"e"}}) == {}
    unknown = ScheduledEvent("e", "Terminate", "Scheduled", ("a",))
    assert leave_announcements([unknown], now=NOW, **one)["e"].seconds_left is None
