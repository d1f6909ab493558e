"""What is published of each event, and by whom."""

from __future__ import annotations

import time

import pytest

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    CheckpointQuarantined,
    HangDetected,
    HostQuarantined,
    Metrics,
    NodeLeft,
    NodeReady,
    NodeStarted,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.node.publishing.translation import LONGEST_TAG, NUMBERED_TAGS, Span, Translation, Update, Value

ROUND = {"rank": 0, "members": ("a", "b"), "world_size": 4}


class Node:
    """A node whose events are translated."""

    def __init__(self):
        self.translation = Translation()
        self.time = 1000.0

    def add(self, kind, number=0, after=0.0, **fields):
        self.time += after
        return self.translation.add(kind(time=self.time, node="a", round=number, **fields))

    def enter(self, number=1, **fields):
        return self.add(RoundEntered, number, **{**ROUND, **fields})


@pytest.fixture
def node():
    made = Node()
    assert not made.add(NodeStarted, host="h", pid=1, began=1000.0)
    assert not made.add(NodeReady, after=2)
    return made


def values(update):
    return {each.name: (each.step, round(each.value, 6)) for each in update.values}


def test_logged_values_have_the_step_and_time_of_the_event(node):
    node.enter()
    node.add(Restored, 1, step=0)
    update = node.add(Metrics, 1, after=1, step=3, values={"loss": 0.5, "rate": 0.1})
    assert update.values[:2] == (Value("loss", 3, 0.5, 1003.0), Value("rate", 3, 0.1, 1003.0))


def test_the_run_s_own_metrics_are_those_of_the_reported_steps(node):
    entered = node.enter()
    assert entered.took_over
    assert entered.tags == {"elastic.round.1": "round 1: sealed 4 workers on 2 nodes: a, b"}
    node.add(WorkersStarted, 1, after=1, pids=(1, 2))
    restored = node.add(Restored, 1, after=3, step=10, directory="step-10")
    assert restored.resumed == 10
    assert values(restored) == {"elastic/world_size": (10, 4), "elastic/restarts": (10, 0)}
    first = node.add(Progress, 1, after=1, step=11)
    assert values(first).keys() == {"elastic/world_size", "elastic/restarts", "elastic/goodput"}
    second = node.add(Progress, 1, after=3, step=13)
    assert values(second)["elastic/step_seconds"] == (13, 1.5)
    assert values(second)["elastic/goodput"] == (13, 0.4)  # 4 of 10 s
    assert not node.add(Progress, 1, step=13, last=True), "once for a step"
    assert values(node.add(Metrics, 1, after=1, step=13, values={"loss": 1})) == {"loss": (13, 1)}
    committed = node.add(CheckpointCommitted, 1, step=13, directory="d", seconds=0.25)
    assert values(committed) == {"elastic/checkpoint_pause_seconds": (13, 0.25)}


def test_steps_that_are_trained_again_are_lost_work(node):
    node.enter()
    node.add(Restored, 1, step=0)
    for step in range(1, 9):
        last = node.add(Progress, 1, after=1, step=step)
    assert values(last)["elastic/goodput"] == (8, 0.8)
    node.add(RoundReopened, 1, reason="lost b", lost=("b",))
    node.enter(2, members=("a",), world_size=2)
    assert node.add(Restored, 2, step=4).resumed == 4
    node.add(Progress, 2, after=1, step=5)
    again = node.add(Progress, 2, after=1, step=6)
    assert values(again)["elastic/restarts"] == (6, 1)
    assert values(again)["elastic/world_size"] == (6, 2)
    assert values(again)["elastic/goodput"] == (6, 0.5)  # 4 kept and 2 new ones of 12 s


def test_other_nodes_publish_nothing_until_they_lead_and_then_what_they_know(node):
    assert not node.enter(rank=1)
    assert not node.add(Progress, 1, after=1, step=1)
    assert not node.add(Metrics, 1, step=1, values={"loss": 1})
    assert not node.add(WorkerFailed, 1, rank=3, exit_code=1, message="Traceback\nValueError: no", step=7)
    assert not node.add(RoundReopened, 1, reason="worker 3 failed")
    update = node.enter(2)
    assert update.took_over
    assert update.tags == {
        "elastic.round.1": "round 1: sealed 4 workers on 2 nodes: a, b",
        "elastic.failure.1": "round 1: worker 3 on a failed after step 7 with exit code 1: Traceback",
        "elastic.round_end.1": "round 1 ends: worker 3 failed",
        "elastic.round.2": "round 2: sealed 4 workers on 2 nodes: a, b",
    }
    assert not node.enter(3).took_over
    assert node.enter(4, rank=1).tags == {}
    assert node.enter(5).took_over


def test_tags_are_bounded_in_number_and_length(node):
    names, texts = set(), []
    for number in range(1, 200):
        for update in (
            node.enter(number, members=tuple(f"node-{n:050d}" for n in range(64))),
            node.add(WorkerFailed, number, rank=3, exit_code=1, message="x" * 5000),
            node.add(HangDetected, number, step=4, seconds=100, limit_seconds=60),
            node.add(HostQuarantined, number, host="h" * 900, strikes=3),
            node.add(CheckpointQuarantined, number, directory="d", problems="p"),
            node.add(RoundReopened, number, reason="r" * 900, lost=("b",)),
        ):
            names |= update.tags.keys()
            texts += update.tags.values()
    assert len(names) == 3 * (NUMBERED_TAGS + 1) + 2
    assert max(map(len, texts)) == LONGEST_TAG


@pytest.mark.parametrize(
    ("kind", "fields", "ended", "tag"),
    [
        (RunEnded, {"succeeded": True}, True, "succeeded"),
        (RunEnded, {"succeeded": False, "message": "broken"}, False, "failed: broken"),
        (NodeLeft, {"reason": "another node failed", "exit_code": 1}, False, "another node failed"),
        (NodeLeft, {"reason": "preempted (notice)", "exit_code": 75}, None, "preempted"),
    ],
)
def test_the_end_of_the_run(node, kind, fields, ended, tag):
    node.enter()
    update = node.add(kind, 1, after=5, **fields)
    assert update.ended is ended
    assert update.tags["elastic.end"].endswith(tag) or tag in update.tags["elastic.end"]
    assert update.spans == (Span("round", 1002.0, 1007.0, {"round": 1, "world_size": 4, "nodes": 2}),)


def test_rounds_saves_and_restores_are_spans(node):
    attributes = {"round": 1, "world_size": 4, "nodes": 2}
    assert node.enter().spans == (Span("round", 1002.0, None, attributes),)
    node.add(WorkersStarted, 1, after=1, pids=())
    restored = node.add(Restored, 1, after=2, step=4, directory="d")
    assert restored.spans == (Span("restore", 1003.0, 1005.0, {"round": 1, "step": 4, "directory": "d"}),)
    saved = node.add(CheckpointCommitted, 1, after=10, step=9, directory="e", seconds=0.5)
    assert saved.spans == (Span("save", 1014.5, 1015.0, {"round": 1, "step": 9, "directory": "e"}),)
    ended = node.add(RoundReopened, 1, after=1, reason="lost b", lost=("b",))
    assert ended.spans == (Span("round", 1002.0, 1016.0, attributes),)
    assert node.enter(2, rank=1) == Update()


def test_a_long_run_is_translated_quickly(node):
    node.enter()
    node.add(Restored, 1, step=0)
    for step in range(1, 700):  # a week's, see EventRate
        node.add(Progress, 1, after=1, step=step)
    began = time.perf_counter()
    node.add(Progress, 1, after=1, step=700)
    assert time.perf_counter() - began < 0.5
