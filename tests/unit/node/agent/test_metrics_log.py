"""Logged values in the ledger: few events, the last of each name, and those of rank 0 alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from azureml_elastic.ipc import MessageClient
from azureml_elastic.ipc.worker_messages import FROM_WORKER, Assign, Expects, Hello, Logged
from azureml_elastic.ledger.events import Metrics
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.node.agent.event_logs import MetricsLog
from azureml_elastic.node.records.event_recorder import Recorder
from tests.support.channels import open_channel
from tests.support.waiting import until


@pytest.fixture
def recorder(tmp_path):
    pen = Recorder(tmp_path, "node-0", "inc", None)
    yield pen
    pen.close()


@pytest.fixture
def recorded(tmp_path, recorder):
    reader = EventReader(tmp_path / "events")

    def read():
        return [(event.round, event.step, event.values) for event in reader.read() if isinstance(event, Metrics)]

    return read


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_last_value_of_each_name_within_an_interval_is_recorded_with_its_step(recorder, recorded):
    clock = Clock()
    log = MetricsLog(recorder, clock)
    log.logged(1, 1, {"loss": 1.0})
    for step in range(2, 6):
        clock.now += 0.01
        log.logged(1, step, {"loss": float(step)} | ({"accuracy": 0.5} if step == 3 else {}))
    clock.now += 0.1
    log.logged(1, 6, {"loss": 6.0})
    log.logged(1, 7, {"loss": 7.0})
    assert recorded() == [(1, 1, {"loss": 1.0}), (1, 3, {"accuracy": 0.5}), (1, 6, {"loss": 6.0})]
    log.flush()
    log.flush()
    assert recorded() == [(1, 7, {"loss": 7.0})]


def test_the_last_values_of_a_round_are_recorded_with_it_and_later_ones_of_it_are_not(recorder, recorded):
    log = MetricsLog(recorder, Clock())
    log.logged(1, 1, {"loss": 1.0})
    log.logged(1, 2, {"loss": 2.0})
    log.logged(2, 2, {"loss": math.nan})
    log.logged(1, 3, {"loss": 3.0})
    log.flush()
    (first, second, (number, step, values)) = recorded()
    assert (first, second) == ((1, 1, {"loss": 1.0}), (1, 2, {"loss": 2.0}))
    assert (number, step) == (2, 2)
    assert math.isnan(values["loss"])


def test_a_week_has_some_ten_thousand_records_and_one_a_minute_at_least(recorder, recorded):
    clock = Clock()
    log = MetricsLog(recorder, clock)
    for step in range(7 * 24 * 360):
        clock.now += 10
        log.logged(1, step, {"loss": 0.5})
    steps = [step for _, step, _ in recorded()]
    assert 10_000 < len(steps) < 11_000
    assert max(after - before for before, after in pairwise(steps)) == 6


def test_more_names_than_a_thousand_are_dropped_with_a_warning(recorder, recorded, caplog):
    log = MetricsLog(recorder, Clock())
    log.logged(1, 1, {"first": 0.0})
    for part in range(12):
        log.logged(1, 2, {f"{part}/{number}": 0.0 for number in range(100)})
    log.flush()
    assert [len(values) for _, _, values in recorded()] == [1, 1000]
    assert caplog.text.count("Log values of one kind under one name") == 1


def test_the_values_of_rank_0_s_worker_count_even_if_they_arrive_late(recorder, recorded):
    channel = open_channel(recorder)
    channel.begin(1, 2, None)
    workers = [MessageClient(channel.path, lambda _, __: None, lambda _: None) for _ in range(2)]

    def send(rank, number, *messages):
        for message in (*messages, Expects(number)):
            workers[rank].send(FROM_WORKER.encode(message))
        until(lambda: channel.workers.expected == number)  # they arrive in order

    try:
        for rank in range(2):
            send(rank, rank, Hello(rank, rank, 1), Logged(4, {"loss": float(rank)}))
        channel.record_last_step()
        assert recorded() == [(1, 4, {"loss": 0.0})]
        channel.begin(2, 2, None, keep=True)
        send(0, 2, Logged(5, {"loss": 0.25}))  # before the assignment
        channel.workers.assign({rank: Assign(2, 1 - rank, 2, {}) for rank in (0, 1)})
        send(0, 3, Logged(6, {"loss": 0.5}))
        send(1, 4, Logged(6, {"loss": 0.75}))
        channel.record_last_step()
        assert recorded() == [(1, 5, {"loss": 0.25}), (2, 6, {"loss": 0.75})]
    finally:
        for worker in workers:
            worker.close()
        channel.close()
