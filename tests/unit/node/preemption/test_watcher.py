"""Preemption notices from signals, scheduled events and marker files, and their withdrawal."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest

from azureml_elastic.config import PreemptionPolicy
from azureml_elastic.local.faults.metadata_service import MetadataService
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.preemption.notices import Announcement, MarkerFile, Notice, merge
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from tests.support.waiting import until

TIMEOUT_S = 20.0


def policy(**fields):
    return PreemptionPolicy(**{"scheduled_events": None, **fields})


@contextmanager
def opened(made):
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    made.listen()
    made.watch()
    try:
        yield made
    finally:
        made.close()
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.fixture
def woken():
    return EventQueue()


@pytest.fixture
def preemption(woken):
    with opened(PreemptionWatcher(policy(grace=0), woken, interval=0.02)) as made:
        yield made


@pytest.fixture
def service():
    with MetadataService() as running:
        yield running


@pytest.fixture
def asking(service, woken):
    """A watch that asks the service, and has a minute of grace."""
    made = PreemptionWatcher(policy(grace=60, scheduled_events=service.address("vm_1")), woken, interval=0.02)
    with opened(made):
        yield made


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_a_notice(preemption, woken, signum, code):
    assert not preemption.noticed
    assert preemption.seconds_left > 0
    assert not preemption.commit_to_leave()
    os.kill(os.getpid(), signum)
    assert woken.wait(10)
    assert preemption.noticed
    assert preemption.seconds_left == 0  # no grace
    assert preemption.commit_to_leave()
    assert (preemption.exit_code, preemption.reason) == (code, signum.name)


def test_workers_have_what_is_left_of_the_first_notice(woken):
    with opened(PreemptionWatcher(policy(grace=20), woken, interval=0.02)) as preemption:
        assert preemption.seconds_left == float("inf")
        preemption.announce("event", {"late": Announcement("late", seconds_left=15.0)})
        assert 10 < preemption.seconds_left <= 15
        preemption.announce("marker", {"now": Announcement("now", seconds_left=5.0)})
        assert 0 < preemption.seconds_left <= 5
        assert preemption.seconds_left > 0


def test_a_storm_of_signals_while_the_wake_is_used_does_not_deadlock(preemption, woken):
    stop = threading.Event()

    def storm() -> None:
        while not stop.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=storm)
    thread.start()
    for _ in range(500):
        woken.wait(0.0001)
        assert preemption.commit_to_leave() in (False, True)
    stop.set()
    thread.join()
    assert preemption.noticed


def test_an_event_is_a_notice_until_it_is_withdrawn(service, asking, woken):
    event = service.announce("Preempt", "vm_1")
    assert woken.wait(TIMEOUT_S)
    assert asking.noticed
    assert asking.seconds_left > 0
    assert (asking.reason, asking.exit_code) == (f"scheduled event Preempt {event}", 143)
    service.remove(event)
    assert woken.wait(TIMEOUT_S)
    assert not asking.noticed
    assert not asking.commit_to_leave()
    assert asking.reason == "no notice"


def test_a_committed_node_leaves_although_the_event_is_withdrawn(service, asking, caplog):
    caplog.set_level(logging.INFO)
    event = service.announce("Preempt", "vm_1")
    until(lambda: asking.noticed)
    assert asking.commit_to_leave()
    service.remove(event)
    until(lambda: "too late" in caplog.text)
    assert asking.noticed
    assert asking.commit_to_leave()
    assert asking.reason == f"scheduled event Preempt {event}"


def test_a_withdrawn_event_leaves_a_signal_standing(service, asking):
    event = service.announce("Preempt", "vm_1")
    until(lambda: asking.noticed)
    os.kill(os.getpid(), signal.SIGINT)
    assert (asking.reason, asking.exit_code) == (f"scheduled event Preempt {event}", 143)
    service.remove(event)
    until(lambda: asking.reason == "SIGINT")
    assert asking.noticed
    assert asking.exit_code == 130


def test_the_time_that_is_left_is_the_end_of_the_grace(service, asking, monkeypatch):
    service.announce("Preempt", "vm_1", notice=30)
    until(lambda: asking.noticed)
    assert asking.seconds_left > 0
    (notice,) = asking._notices()
    assert 0 < notice.until - notice.since <= 30
    clock = SimpleNamespace(monotonic=lambda: notice.until)
    monkeypatch.setattr("azureml_elastic.node.preemption.watcher.time", clock)
    assert asking.seconds_left == 0


def test_a_marker_is_a_notice_while_it_is_there(tmp_path, woken):
    with opened(
        PreemptionWatcher(policy(marker=str(tmp_path / "leave-{node}")), woken, "node-7", interval=0.02)
    ) as preemption:
        (tmp_path / "leave-node-8").touch()
        marker = tmp_path / "leave-node-7"
        time.sleep(0.1)
        assert not preemption.noticed
        marker.touch()
        assert woken.wait(TIMEOUT_S)
        assert (preemption.noticed, preemption.reason) == (True, f"marker file {marker}")
        assert preemption.exit_code == 143
        marker.unlink()
        until(lambda: not preemption.noticed)


def test_an_unreadable_marker_is_inconclusive(tmp_path):
    said = []
    loop = tmp_path / "loop"
    watch = MarkerFile(str(loop / "leave"), said.append)
    watch.poll()
    assert said == [{}]
    loop.symlink_to(loop)
    watch.poll()  # too many links, as a mount that is away: an error that is no absence
    assert said == [{}]
    loop.unlink()
    loop.mkdir()
    (loop / "leave").symlink_to("nowhere")
    watch.poll()
    assert list(said[-1]) == [str(loop / "leave")]


def test_a_notice_keeps_its_beginning_and_its_end_comes_only_nearer():
    def after(standing, now, left):
        said = {} if left == "gone" else {"e": Announcement("event", left)}
        return merge(standing, "event", said, now=now, grace=25.0, exit_code=143)

    other = {"marker:m": Notice("marker", 3.0, 28.0, 143)}
    standing = after(other, 100.0, 30.0)
    assert standing["event:e"] == Notice("event", 100.0, 125.0, 143)
    standing = after(standing, 101.0, 10.0)
    assert standing["event:e"] == Notice("event", 100.0, 111.0, 143)
    standing = after(standing, 102.0, None)
    standing = after(standing, 103.0, -5.0)
    assert standing["event:e"] == Notice("event", 100.0, 111.0, 143)
    assert min(standing.values(), key=lambda notice: notice.since).reason == "marker"
    assert after(standing, 104.0, "gone") == other
    assert after({}, 0.0, -5.0)["event:e"].until == 25.0  # nobody knows how long: as long as there is grace
    assert timedelta(seconds=25) == PreemptionPolicy().grace
