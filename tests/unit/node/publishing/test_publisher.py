"""The threads that publish never delay or fail the run."""

from __future__ import annotations

import threading
import time

import pytest

from azureml_elastic.errors import MissingExtra
from azureml_elastic.ledger.events import Metrics, RoundEntered
from azureml_elastic.node.publishing import publisher as module
from azureml_elastic.node.publishing.publisher import Publishing, PublishingThread
from tests.support.waiting import until

ENTERED = RoundEntered(time=1.0, node="a", round=1, rank=0, members=("a",), world_size=1)


def logged(step):
    return Metrics(time=1.0, node="a", round=1, step=step, values={"loss": 0.5})


class Destination:
    """A destination that may block or fail."""

    def __init__(self):
        self.steps = []
        self.failures = 0
        self.may = threading.Event()
        self.may.set()
        self.opened = self.closed = 0

    def __call__(self):
        self.opened += 1
        return self

    def publish(self, updates):
        assert self.may.wait(60)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no way")
        self.steps += [each.step for update in updates for each in update.values if each.name == "loss"]

    def close(self):
        self.closed += 1


def leading(open_it):
    """Return what publishes to a destination on a node that has entered a round as the first one."""
    publishing = Publishing([PublishingThread("it", open_it)])
    publishing.put(ENTERED)
    return publishing


@pytest.fixture
def destination():
    made = Destination()
    yield made
    made.may.set()


def test_events_are_published_in_order_and_the_rest_at_the_end(destination):
    publishing = leading(destination)
    publishing.put(logged(1))
    until(lambda: destination.steps == [1])
    destination.may.clear()
    for step in range(2, 50):
        publishing.put(logged(step))
    destination.may.set()
    publishing.close()
    assert destination.steps == list(range(1, 50))
    assert (destination.opened, destination.closed) == (1, 1)


def test_a_node_that_does_not_lead_opens_nothing(destination):
    publishing = Publishing([PublishingThread("it", destination)])
    publishing.put(ENTERED.model_copy(update={"rank": 1}))
    publishing.put(logged(1))
    publishing.close()
    assert destination.opened == 0


def test_a_failing_destination_is_tried_again_with_all_that_waits(destination, caplog):
    destination.failures = 1
    publishing = leading(destination)
    publishing.put(logged(1))
    until(lambda: destination.steps == [1])
    destination.failures = 10**6
    publishing.put(logged(2))
    publishing.close()
    assert caplog.text.count("Publishing to it fails and is tried again") == 1
    assert destination.closed == 1


def test_the_last_attempt_at_the_end_may_succeed(destination):
    destination.failures = 1
    publishing = leading(destination)
    publishing.put(logged(1))
    until(lambda: destination.failures == 0)
    publishing.close()
    assert destination.steps == [1]


def test_a_blocked_destination_delays_the_end_for_a_short_time_only(destination, caplog, monkeypatch):
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.2)
    destination.may.clear()
    publishing = Publishing([PublishingThread("it", destination)])
    began = time.monotonic()
    for step in range(15_000):
        publishing.put(ENTERED if step == 0 else logged(step))
    publishing.close()
    assert time.monotonic() - began < 10
    assert caplog.text.count("events wait for it; some are not published") == 1
    assert "Not everything was published to it within 0.2 s" in caplog.text


def test_a_destination_that_is_still_being_opened_at_the_end_gets_its_time(destination, caplog, monkeypatch):
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.05)

    def open_slowly():
        time.sleep(0.5)  # as imports do on a machine with much to do
        return destination()

    publishing = leading(open_slowly)
    publishing.put(logged(1))
    publishing.close()
    until(lambda: destination.closed == 1)
    assert destination.steps == [1]
    assert caplog.text == ""


def test_a_missing_package_is_reported_once_and_ends_it(caplog):
    def open_it():
        raise MissingExtra("tensorboard", "tensorboard")

    publishing = leading(open_it)
    until(lambda: "Nothing is published to it" in caplog.text)
    for step in range(15_000):
        publishing.put(logged(step))
    publishing.close()
    assert "azureml-elastic[tensorboard]" in caplog.text
    assert "wait for it" not in caplog.text
