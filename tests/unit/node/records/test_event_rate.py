"""The rate of recorded steps over a week, and the ledger that it makes."""

from itertools import pairwise

from azureml_elastic.ledger.events import Progress
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.node.agent.event_logs import EventRate, ProgressLog
from azureml_elastic.node.records.event_recorder import Recorder

WEEK = 7 * 24 * 3600


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def recorded(seconds, step_seconds):
    """Return the times at which events of a run with steps of this duration are recorded."""
    clock = Clock()
    rate = EventRate(clock)
    times = []
    while clock.now < 1000.0 + seconds:
        if rate.due():
            times.append(clock.now - 1000.0)
        clock.now += step_seconds
    return times


def test_a_week_of_64_nodes_stays_under_100_000_events():
    assert 64 * len(recorded(WEEK, 0.25)) < 50_000


def test_a_short_run_has_20_events_a_second():
    times = recorded(5, 0.01)
    assert 45 <= len(times) <= 101


def test_the_pauses_are_two_percent_of_the_time_before():
    times = recorded(10_000, 0.2)
    assert all(later - time <= 0.02 * time + 0.4 for time, later in pairwise(times))


def test_the_last_step_of_a_round_is_recorded_whatever_the_rate(tmp_path):
    recorder = Recorder(tmp_path, "a", "i", None)
    log = ProgressLog(recorder)
    for step in range(1, 2001):
        log.completed(1, step, 32)
        log.completed(1, step, 32)  # the other worker of the node
    log.completed(2, 2001, 16)
    log.flush()
    recorder.close()
    events = [event for event in read_events(tmp_path / "events") if isinstance(event, Progress)]
    assert len(events) < 1000
    assert [(event.round, event.step, event.samples) for event in events if event.last] == [
        (1, 2000, 64_000),
        (2, 2001, 16),
    ]
