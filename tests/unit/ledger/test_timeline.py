"""Rounds, world sizes, recoveries and outcomes from events."""

import pytest

from azureml_elastic.ledger.events import (
    Progress,
    RanksConnecting,
    Restored,
    RoundReopened,
    RunEnded,
    WorkerFailed,
)
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.samples import steps_undone
from azureml_elastic.ledger.sentences import headline
from azureml_elastic.ledger.timeline import recoveries, rounds, world_sizes
from tests.support.histories import enter, loss_and_newcomer, steps


def test_rounds_have_members_steps_and_reasons():
    first, second, third = rounds(Picture.of(loss_and_newcomer()))
    assert (first.number, first.members, first.world_size) == (1, ("node-0", "node-1", "node-2"), 3)
    assert (first.restored_step, first.first_step, first.last_step) == (0, 1, 12)
    assert (first.reason, first.lost) == ("node-0 is lost", ("node-0",))
    assert (second.restored_step, second.first_step, second.last_step) == (10, 11, 20)
    assert (second.reason, second.lost) == ("node-3 is ready", ())
    assert third.reason == "the run succeeded"


def test_both_times_of_a_round_come_from_the_node_that_recorded_its_end():
    skewed = [
        event.model_copy(update={"time": event.time + 1000}) if event.node == "node-2" else event
        for event in loss_and_newcomer()
    ]
    first = rounds(Picture.of(skewed))[0]
    assert (first.reporter, first.started, first.ended) == ("node-2", 1010.0, 1023.5)


def test_a_round_without_a_recorded_end_ends_with_its_reporter_s_last_event():
    events = [*enter(1, ["a", "b"], at=5.0), *steps(1, ["a"], 1, 3, at=6.0)]
    assert (rounds(Picture.of(events))[0].reporter, rounds(Picture.of(events))[0].ended) == ("a", 8.0)


def test_world_sizes_count_rounds_that_ran_and_merge_equal_neighbours():
    events = [
        *enter(1, ["a", "b"], at=1.0),
        *enter(2, ["a"], at=2.0, ran=False),  # re-formed before any worker was there
        *enter(3, ["b", "c"], at=3.0),
        *enter(4, ["b", "c", "d"], at=4.0, slots=2),
    ]
    assert world_sizes(rounds(Picture.of(events))) == [2, 6]
    assert world_sizes(rounds(Picture())) == []


def test_a_recovery_is_measured_from_the_survivor_s_notice_to_its_next_step():
    (recovery,) = recoveries(Picture.of(loss_and_newcomer()))
    assert (recovery.round, recovery.resumed, recovery.step) == (1, 2, 11)
    assert (recovery.lost, recovery.since) == (("node-0",), "notice")
    assert recovery.seconds == pytest.approx(1.5)


def test_a_recovery_is_measured_from_the_loss_where_that_is_known():
    (recovery,) = recoveries(
        Picture.of(loss_and_newcomer()), [("node-0", 23.0), ("node-0", 3.0), ("node-0", 60.0), ("node-9", 20.0)]
    )
    assert (recovery.since, recovery.seconds) == ("loss", pytest.approx(2.0))


def test_a_recovery_without_a_recorded_loss_is_measured_from_the_last_step():
    events = [event for event in loss_and_newcomer() if not isinstance(event, RoundReopened)]
    recovery = recoveries(Picture.of(events))[0]
    assert (recovery.lost, recovery.since) == (("node-0",), "last step")
    assert recovery.seconds == pytest.approx(25.0 - 22.0)


def test_clocks_of_two_nodes_are_never_compared():
    skewed = [
        event.model_copy(update={"time": event.time - 500}) if event.node == "node-1" else event
        for event in loss_and_newcomer()
    ]
    assert recoveries(Picture.of(skewed))[0].seconds == pytest.approx(1.5)


def test_a_failed_worker_causes_a_recovery_and_a_new_node_does_not():
    events = [
        *enter(1, ["a"], at=1.0),
        *steps(1, ["a"], 1, 3, at=2.0),
        WorkerFailed(time=5.0, node="a", round=1, rank=0, exit_code=1, message="x"),
        RoundReopened(time=5.1, node="a", round=1, reason="worker 0 failed"),
        *enter(2, ["a"], at=6.0),
        *steps(2, ["a"], 1, 3, at=8.0),
        RoundReopened(time=11.0, node="a", round=2, reason="b is ready"),
        *enter(3, ["a", "b"], at=12.0),
        *steps(3, ["a", "b"], 4, 5, at=13.0),
    ]
    (recovery,) = recoveries(Picture.of(events))
    assert (recovery.round, recovery.lost, recovery.seconds) == (1, (), pytest.approx(3.0))


def test_a_second_loss_before_the_next_step_prolongs_the_first_recovery():
    events = [
        *enter(1, ["a", "b", "c"], at=1.0),
        *steps(1, ["a", "b", "c"], 1, 3, at=2.0),
        RoundReopened(time=5.0, node="a", round=1, reason="c is lost", lost=("c",)),
        *enter(2, ["a", "b"], at=6.0),
        RoundReopened(time=7.0, node="a", round=2, reason="b is lost", lost=("b",)),
        *enter(3, ["a"], at=8.0),
        *steps(3, ["a"], 1, 3, at=9.0),
    ]
    assert [(found.round, found.resumed, found.seconds) for found in recoveries(Picture.of(events))] == [
        (1, 3, 4.0),
        (2, 3, 2.0),
    ]


def several_losses():
    """Steps 8 to 10 are undone by the first loss, 6 and 7 with 8 and 9 by the second; the third one costs nothing."""
    return [
        *enter(1, ["a", "b", "c", "d"], at=1.0),
        *steps(1, ["a", "b"], 1, 10, at=2.0),
        RoundReopened(time=12.5, node="a", round=1, reason="d is lost", lost=("d",)),
        *enter(2, ["a", "b", "c"], at=13.0),
        Restored(time=13.5, node="a", round=2, step=7),
        *steps(2, ["a", "b"], 8, 9, at=14.0),
        RoundReopened(time=16.5, node="a", round=2, reason="c is lost", lost=("c",)),
        *enter(3, ["a", "b"], at=17.0),  # ends before its workers have restored anything
        RoundReopened(time=17.5, node="a", round=3, reason="e is ready"),
        *enter(4, ["a", "b", "e"], at=18.0),
        Restored(time=18.5, node="a", round=4, step=5),
        *steps(4, ["a", "b"], 6, 12, at=19.0),
        RoundReopened(time=27.0, node="a", round=4, reason="b is lost", lost=("b",)),
        *enter(5, ["a", "e"], at=28.0),
        Restored(time=28.5, node="a", round=5, step=13),  # one that was not reported
        *steps(5, ["a"], 14, 16, at=29.0),
    ]


def test_each_loss_has_the_steps_that_it_cost():
    found = recoveries(Picture.of(several_losses()))
    assert [(each.lost, each.lost_steps) for each in found] == [(("d",), 3), (("c",), 4), (("b",), 0)]
    assert sum(each.lost_steps for each in found) == sum(steps_undone(Picture.of(several_losses())).values())


def test_steps_that_two_losses_have_cost_together_are_counted_once():
    events = [event for event in several_losses() if event.round != 2 or not isinstance(event, Restored | Progress)]
    found = recoveries(Picture.of(events))
    assert [(each.lost, each.resumed, each.lost_steps) for each in found] == [
        (("d",), 4, 0),
        (("c",), 4, 5),
        (("b",), 5, 0),
    ]
    assert steps_undone(Picture.of(events)) == {4: 5}


@pytest.mark.parametrize("ahead", [0.0, 500.0])
def test_a_script_without_a_session_has_recovered_when_its_workers_connect(ahead):
    """Also where another node notices the loss than the one that sees the connection, by another clock."""
    events = [
        *enter(1, ["a", "b", "c"], at=1.0),
        RoundReopened(time=5.0, node="b", round=1, reason="lost c", lost=("c",)),
        *enter(2, ["b"], at=6.0),
        *(event.model_copy(update={"time": event.time + ahead}) for event in enter(2, ["a"], at=6.0)),
        RanksConnecting(time=6.5 + ahead, node="a", round=2),
    ]
    (recovery,) = recoveries(Picture.of(events))
    assert (recovery.step, recovery.lost, recovery.since) == (None, ("c",), "notice")
    assert recovery.seconds == pytest.approx(1.5)
    assert recoveries(Picture.of(events[:-1])) == []


def test_without_a_step_afterwards_there_is_no_recovery():
    events = [event for event in loss_and_newcomer() if event.round < 2]
    assert recoveries(Picture.of(events)) == []


CHAINED = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    data["x"]
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise RuntimeError("the file is torn")
RuntimeError: the file is torn
in its middle

Worker 1 on node-1 failed in round 4 with exit code 1: its program raised an exception."""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (CHAINED, "RuntimeError: the file is torn"),
        ("\nexit code 3\nmore", "exit code 3"),
        ("", ""),
        ("Traceback (most recent call last):\n  cut", ""),
        ("x" * 1000, "x" * 297 + "..."),
    ],
)
def test_a_traceback_never_stands_in_a_tables_cell(message, expected):
    assert headline(message) == expected
    ended = RunEnded(time=2.0, node="a", round=1, succeeded=False, message=message)
    (round_,) = rounds(Picture.of([*enter(1, ["a"], at=1.0), ended]))
    assert round_.reason == f"the run failed: {expected}"
