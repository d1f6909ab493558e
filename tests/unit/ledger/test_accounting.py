"""The accounting of the nodes' time, on histories written by hand and drawn at random."""

from itertools import pairwise

import pytest
from hypothesis import given

from azureml_elastic.ledger.accounting import account, goodput, highest_goodput, totals
from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    HangDetected,
    NodeLeft,
    NodeReady,
    NodeStarted,
    Progress,
    RanksConnecting,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    StateSaved,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.picture import NodeTime, Picture
from azureml_elastic.ledger.samples import steps_undone
from tests.support.histories import any_events


def started(at, node, ready):
    return [
        NodeStarted(time=at + 0.5, node=node, host="h", pid=1, began=at),
        NodeReady(time=ready, node=node),
    ]


def entered(at, node, number, *members):
    return [
        RoundEntered(time=at, node=node, round=number, rank=members.index(node), members=members, world_size=2),
        WorkersStarted(time=at + 0.1, node=node, round=number, pids=(1,)),
    ]


def steps(node, number, times):
    """Return the progress of a node: step by time."""
    return [Progress(time=at, node=node, round=number, step=step) for step, at in times.items()]


def summed(events, times=None):
    """Return the seconds of each node by activity, with the cause where there is one."""
    found = {}
    for span in account(Picture.of(events), times):
        name = span.activity if span.cause is None else f"{span.activity}: {span.cause}"
        own = found.setdefault(span.node, {})
        own[name] = round(own.get(name, 0) + span.seconds, 6)
    return found


def lost_node(reason="lost b", left=()):
    """Two nodes train ten steps of one second; then b is lost, and a goes on alone from step 7."""
    return [
        *started(0, "a", 2),
        *started(1, "b", 4),
        *entered(4, "a", 1, "a", "b"),
        *entered(4, "b", 1, "a", "b"),
        Restored(time=5, node="a", round=1, step=0),
        *steps("a", 1, {step: 5 + step for step in range(1, 11)}),
        *steps("b", 1, {step: 5 + step for step in range(1, 11)}),
        CheckpointCommitted(time=12.9, node="a", round=1, step=7, directory="x", seconds=0.25),
        *left,
        RoundReopened(time=16, node="a", round=1, reason=reason, lost=("b",)),
        *entered(17, "a", 2, "a"),
        Restored(time=18, node="a", round=2, step=7),
        *steps("a", 2, {step: 18 + step - 7 for step in range(8, 13)}),
        RunEnded(time=24, node="a", round=2, succeeded=True),
        NodeLeft(time=24.5, node="a", round=2, reason="the run ended well", exit_code=0),
    ]


def test_a_lost_node_costs_the_recovery_and_the_steps_after_the_checkpoint():
    found = summed(lost_node(), {"b": NodeTime(0.75, 15.5)})
    assert found["a"] == {
        "starting": 3.0,  # before it waits, and from the round to the first step
        "waiting": 2.0,
        "training": 12.0,  # seven steps, and five after the loss
        "saving": 0.25,
        "lost work: node loss": 2.75,
        "recovering: node loss": 3.0,
        "idle": 1.5,
    }
    assert found["b"] == {
        "starting": 4.25,
        "training": 7.0,
        "saving": 0.25,
        "lost work: node loss": 3.25,  # with the step in which it was killed
    }
    assert steps_undone(Picture.of(lost_node())) == {2: 3}


@pytest.mark.parametrize(
    ("reason", "left", "cause"),
    [
        ("lost b", [], "node loss"),
        ("b was preempted", [], "preemption"),
        ("lost b", [NodeLeft(time=15.2, node="b", round=1, reason="preempted (SIGTERM)", exit_code=143)], "preemption"),
        ("x", [WorkerFailed(time=15.2, node="b", round=1, rank=1, exit_code=1, message="")], "worker crash"),
        ("x", [HangDetected(time=15.2, node="a", round=1, step=10, seconds=9, limit_seconds=8)], "hang"),
    ],
)
def test_causes_follow_from_the_events_of_the_round(reason, left, cause):
    found = account(Picture.of(lost_node(reason, left)))
    assert {span.cause for span in found} == {None, cause}


def test_a_killed_node_has_trained_as_far_as_the_others_where_its_last_steps_were_not_recorded():
    events = lost_node()
    thinned = [event for event in events if not (isinstance(event, Progress) and event.node == "b" and event.step > 5)]
    times = {"b": NodeTime(0.75, 15.5)}
    assert summed(thinned, times)["b"] == pytest.approx(summed(events, times)["b"])
    early = summed(thinned, {"b": NodeTime(0.75, 11.5)})["b"]  # it cannot have trained after its end
    assert early["training"] == pytest.approx(6.5)
    assert sum(early.values()) == pytest.approx(11.5 - 0.75)


def test_a_newcomer_waits_as_a_spare_until_the_others_change_the_round():
    events = [
        *started(0, "a", 1),
        *entered(1, "a", 1, "a"),
        Restored(time=2, node="a", round=1, step=0),
        *steps("a", 1, {1: 3, 2: 4, 3: 5}),
        *started(2, "b", 3),
        RoundReopened(time=5.5, node="a", round=1, reason="rescale at a step boundary"),
        *entered(6, "a", 2, "a", "b"),
        *entered(6, "b", 2, "a", "b"),
        Restored(time=7, node="a", round=2, step=3),
        *steps("a", 2, {4: 8, 5: 9}),
        *steps("b", 2, {4: 8, 5: 9}),
        RunEnded(time=9, node="a", round=2, succeeded=True),
    ]
    found = summed(events)
    assert found["a"] == {"starting": 2.0, "training": 5.0, "recovering: scale-up": 2.0}
    assert found["b"] == {"starting": 2.0, "idle": 2.5, "waiting": 0.5, "training": 2.0}
    assert steps_undone(Picture.of(events)) == {}
    assert goodput(totals(account(Picture.of(events)))) == pytest.approx(7 / 16)


def test_a_node_that_no_round_takes_waits_or_is_idle():
    events = [*started(0, "a", 1), NodeLeft(time=9, node="a", reason="cancelled", exit_code=1)]
    assert summed(events) == {"a": {"starting": 1.0, "waiting": 8.0}}
    spare = [*started(3, "c", 4), NodeLeft(time=24, node="c", reason="over", exit_code=0)]
    assert summed([*lost_node(), *spare])["c"] == {"starting": 1.0, "idle": 19.0, "waiting": 1.0}


def unreported(*seen, ahead=0.0):
    """A script without a session on two nodes, of which b is lost; a's clock is that far ahead of b's."""
    a = [
        *started(0, "a", 1),
        *entered(2, "a", 1, "a", "b"),
        *seen,
        RoundReopened(time=12, node="a", round=1, reason="lost b", lost=("b",)),
        *entered(12.1, "a", 2, "a"),
        RanksConnecting(time=12.4, node="a", round=2),
        RunEnded(time=20, node="a", round=2, succeeded=True),
    ]
    moved = [event.model_copy(update={"time": event.time + ahead}) for event in a]
    return [*moved, *started(0, "b", 1), *entered(2, "b", 1, "a", "b")]


CONNECTING, SAVED = RanksConnecting(time=3, node="a", round=1), StateSaved(time=9, node="a", round=1)
LOST = {"b": NodeTime(0.75, 11.5)}


@pytest.mark.parametrize("ahead", [0.0, 1000.0, -1000.0])
def test_a_script_without_a_session_has_trained_up_to_its_last_save(ahead):
    found = summed(unreported(CONNECTING, StateSaved(time=6, node="a", round=1), SAVED, ahead=ahead), LOST)
    a, b = ({name: own[name] for name in own.keys() - {"starting", "waiting", "idle"}} for own in found.values())
    recovered = {"recovering: node loss": pytest.approx(0.4)}
    assert a == {"training": pytest.approx(6 + 7.6), "lost work: node loss": 3.0, **recovered}
    assert b == {"training": 6.0, "lost work: node loss": 2.5}
    later = summed(unreported(CONNECTING, SAVED, ahead=ahead), {"b": NodeTime(0.75, 12.5)})["b"]
    assert later["lost work: node loss"] == 3.5, "it was noticed before its process had ended"


def test_the_work_of_a_round_whose_saves_nobody_has_seen_is_unknown():
    events = unreported(CONNECTING)
    found = summed(events, LOST)
    assert (found["a"]["unknown"], found["a"]["training"]) == (9.0, pytest.approx(7.6))
    assert found["b"]["unknown"] == 8.5
    shares = totals(account(Picture.of(events), LOST))
    whole = sum(total.seconds for total in shares)
    assert goodput(shares) == pytest.approx(7.6 / whole)
    assert highest_goodput(shares) == pytest.approx((7.6 + 17.5) / whole)


def test_workers_that_nobody_has_seen_connect_may_have_trained():
    assert summed(unreported(), LOST)["a"]["unknown"] == pytest.approx(9.9)
    assert summed(unreported(SAVED), LOST)["a"]["lost work: node loss"] == 3.0
    alone = [*started(0, "a", 1), *entered(2, "a", 1, "a"), RunEnded(time=9, node="a", round=1, succeeded=True)]
    assert summed(alone)["a"] == {"starting": pytest.approx(1.1), "waiting": 1.0, "training": pytest.approx(6.9)}


@pytest.mark.parametrize("connected", [False, True])
def test_a_program_that_fails_before_its_workers_connect_has_not_trained(connected):
    seen = [CONNECTING] if connected else []
    failure = WorkerFailed(time=4, node="b", round=1, rank=1, exit_code=2, message="")
    again = WorkerFailed(time=7, node="a", round=2, rank=0, exit_code=2, message="")
    events = [
        *started(0, "a", 1),
        *entered(2, "a", 1, "a", "b"),
        *seen,
        *started(0, "b", 1),
        *entered(2, "b", 1, "a", "b"),
        failure,
        RoundReopened(time=4, node="b", round=1, reason="worker 1 on b failed with exit code 2"),
        *entered(5, "a", 2, "a", "b"),
        *entered(5, "b", 2, "a", "b"),
        again,
        RunEnded(time=7, node="a", round=2, succeeded=False),
    ]
    found = summed(events)
    unknown = {"unknown": 1.0} if connected else {}
    starting = 2.0 if connected else 3.0
    assert found["a"] == {"starting": starting, "waiting": 1.0, **unknown, "recovering: worker crash": 3.0}
    assert goodput(totals(account(Picture.of(events)))) == 0


def test_the_present_round_of_a_script_without_a_session_trains_until_now():
    events = unreported(CONNECTING)[:5]
    found = summed(events, {"a": NodeTime(0, 50, running=True)})
    assert found["a"] == {"starting": 2.0, "waiting": 1.0, "training": 47.0}
    assert summed(events[:4], {"a": NodeTime(0, 50, running=True)})["a"] == {"starting": 49.0, "waiting": 1.0}


def test_a_running_node_trains_until_now():
    events = [
        *started(0, "a", 1),
        *entered(2, "a", 1, "a"),
        Restored(time=3, node="a", round=1, step=0),
    ]
    found = summed(events, {"a": NodeTime(0, 50, running=True)})
    assert found == {"a": {"starting": 2.0, "waiting": 1.0, "training": 47.0}}
    ended = [*events, RoundReopened(time=10, node="a", round=1, reason="lost b", lost=("b",))]
    assert summed(ended, {"a": NodeTime(0, 50, running=True)})["a"]["recovering: node loss"] > 0


def test_nothing_is_accounted_without_events():
    assert account(Picture()) == []
    assert totals([]) == []
    assert goodput([]) is None


@given(any_events())
def test_any_events_give_spans_without_gaps_over_the_whole_lifetime(events):
    """Also torn and contradictory ones, as of nodes whose clocks are set back."""
    times = {"a": NodeTime(-5, 1e7)}
    spans = account(Picture.of(events), times)
    for node in {event.node for event in events}:
        own = [span for span in spans if span.node == node]
        written = [event.time for event in events if event.node == node]
        began, ended = (-5, 1e7) if node == "a" else (min(written), max(written))
        assert sum(span.seconds for span in own) == pytest.approx(ended - began)
        assert all(one.ended == other.started and one.seconds > 0 for one, other in pairwise(own))
    assert min(steps_undone(Picture.of(events)).values(), default=1) > 0
