"""Durations are measured from the events of runs, each on one node's clock."""

from __future__ import annotations

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    NodeReady,
    NodeStarted,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkersStarted,
)
from azureml_elastic.simulate.calibration import calibrate
from azureml_elastic.simulate.scenario import Parameters


def steps(node, number, first, last, start, pace):
    return [
        Progress(time=start + (step - first + 1) * pace, node=node, round=number, step=step)
        for step in range(first, last + 1)
    ]


def entered(node, number, time, rank, members):
    return [
        RoundEntered(time=time, node=node, round=number, rank=rank, members=members, world_size=len(members)),
        WorkersStarted(time=time, node=node, round=number, pids=(1,)),
    ]


def run(shift=0.0):
    """Return a run: a and b train 20 steps, b is lost, a trains 20 alone, c joins. The clock of b is an hour late."""
    both, late = ("a", "b"), shift + 3600
    return [
        NodeStarted(time=shift + 1, began=shift, node="a", host="", pid=1),
        NodeReady(time=shift + 10, node="a"),
        *entered("a", 1, shift + 14, 0, both),
        Restored(time=shift + 16, node="a", round=1, step=0),
        *steps("a", 1, 1, 10, shift + 17, 0.5),
        CheckpointCommitted(time=shift + 22 + 2 + 3, node="a", round=1, step=10, directory="d", seconds=2.0),
        *steps("a", 1, 11, 20, shift + 24, 0.5),
        RoundReopened(time=shift + 32, node="a", round=1, reason="lost b", lost=("b",)),
        NodeStarted(time=late + 1, began=late, node="b", host="", pid=1),
        NodeReady(time=late + 12, node="b"),
        *entered("b", 1, late + 14, 1, both),
        *steps("b", 1, 1, 20, late + 17, 0.5),
        *entered("a", 2, shift + 34, 0, ("a",)),
        Restored(time=shift + 35, node="a", round=2, step=20),
        *steps("a", 2, 21, 40, shift + 36, 1.0),
        RoundReopened(time=shift + 60, node="a", round=2, reason="rescale at a step boundary"),
        NodeStarted(time=shift + 31, began=shift + 30, node="c", host="", pid=1),
        NodeReady(time=shift + 50, node="c"),
        *entered("a", 3, shift + 60, 0, ("a", "c")),
        *entered("c", 3, shift + 60, 1, ("a", "c")),
        Restored(time=shift + 61, node="a", round=3, step=40),
        *steps("a", 3, 41, 60, shift + 62, 0.5),
        *steps("c", 3, 41, 60, shift + 62, 0.5),
        RunEnded(time=shift + 76, node="a", round=3, succeeded=True),
    ]


def test_the_durations_of_a_run():
    found = calibrate([run()], Parameters(provisioning_seconds=77))
    assert found.provisioning_seconds == 77  # which no event shows
    assert found.start_seconds == pytest.approx(11)  # of a and b
    assert found.start_seconds + found.preload_seconds == pytest.approx(20)  # of c
    assert found.first_step_seconds == pytest.approx(5)  # of b, which was ready last
    assert found.step_seconds == pytest.approx({1: 1.0, 2: 0.5}, rel=0.02)
    assert found.checkpoint_pause_seconds == 2.0
    assert found.checkpoint_write_seconds == pytest.approx(3.0)
    assert found.recovery_seconds["node loss"] == pytest.approx(4.0)  # from the notice
    assert found.recovery_seconds["scale-up"] == pytest.approx(6.0)  # from the last step
    assert found.recovery_seconds["hang"] == pytest.approx(5.0)  # never seen: as the others
    assert found.finish_seconds == pytest.approx(4.0)


def test_several_runs_are_measured_together_and_a_stall_is_no_step():
    stalled = [
        event.model_copy(update={"time": event.time + 100}) if event.time > 55 and event.node == "a" else event
        for event in run()
    ]
    found = calibrate([run(), run(1000.0), stalled])
    assert found.step_seconds == pytest.approx({1: 1.0, 2: 0.5}, rel=0.02)


def test_events_without_steps_are_refused():
    with pytest.raises(UsageError, match="no round with two reported steps"):
        calibrate([[event for event in run() if not isinstance(event, Progress)]])


def test_a_step_between_two_measured_sizes_follows_amdahl():
    durations = Parameters(step_seconds={1: 10.0, 4: 4.0}, serial_fraction=0.2)
    assert [durations.step_time(nodes) for nodes in (1, 2, 4)] == pytest.approx([10.0, 6.0, 4.0])
    assert durations.step_time(8) == pytest.approx(4.0 * (0.2 + 0.8 / 8) / (0.2 + 0.8 / 4))
    assert Parameters(step_seconds={2: 3.0}, serial_fraction=0.0).step_time(1) == pytest.approx(6.0)
