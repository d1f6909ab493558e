"""What the page shows of each node."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ledger.accounting import Span
from azureml_elastic.ledger.events import CheckpointCommitted, RoundReopened
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import FaultRecord, NodeSummary, Paths, Report
from azureml_elastic.report.node_timelines import node_timelines


def report(tmp_path, **changes):
    return Report(paths=Paths.of(tmp_path), outcome="succeeded", exit_code=0, **changes)


def spans(node, *parts, at=0.0):
    found = []
    for activity, seconds, *rest in parts:
        found.append(Span(node, activity, at, at + seconds, *rest))
        at += seconds
    return found


def test_short_pauses_become_part_of_the_training_around_them(tmp_path):
    own = spans("a", ("starting", 100), ("training", 300, 1), ("saving", 0.1, 1), ("training", 600, 1))
    (timeline,) = node_timelines(report(tmp_path), own, Picture())
    assert [(s.activity, s.ended - s.started) for s in timeline.segments] == [("starting", 100), ("training", 900.1)]
    assert [(name, round(seconds, 3)) for name, seconds in timeline.segments[1].others] == [("saving", 0.1)]


activities = st.sampled_from(["training", "saving", "recovering", "lost work", "waiting"])


@given(st.lists(st.tuples(activities, st.floats(1e-6, 50), st.integers(0, 5)), min_size=1, max_size=300))
def test_segments_cover_the_whole_life_without_gaps(tmp_path_factory, parts):
    own = spans("a", *parts)
    (timeline,) = node_timelines(report(tmp_path_factory.getbasetemp()), own, Picture())
    segments = timeline.segments
    assert (segments[0].started, segments[-1].ended) == (own[0].started, own[-1].ended)
    assert all(before.ended == after.started for before, after in pairwise(segments))
    assert len(segments) <= 801


def test_an_injected_fault_is_not_shown_as_a_loss_too(tmp_path):
    events = [
        RoundReopened(time=5.0, node="a", round=1, reason="b is lost", lost=("b", "c")),
        RoundReopened(time=5.1, node="c", round=1, reason="b is lost", lost=("b",)),
        CheckpointCommitted(time=3.0, node="a", round=1, step=4, directory="x", seconds=0.01),
    ]
    faults = (
        FaultRecord(fault="kill=b@step:4", nodes=("b",), step=4, time=4.5),
        FaultRecord(fault="add@step:6", nodes=("c",), step=6, time=6.0),
    )
    own = [span for name in "abc" for span in spans(name, ("training", 10.0, 1))]
    found = node_timelines(report(tmp_path, faults=faults), own, Picture.of(events))
    assert {line.node: [mark.kind for mark in line.marks] for line in found} == {
        "a": ["checkpoint"],
        "b": ["fault"],
        "c": ["loss", "added"],
    }


def test_many_nodes_and_marks_are_bounded(tmp_path):
    own = [span for index in range(500) for span in spans(f"n{index}", *[("training", 1, 1), ("saving", 1, 1)] * 50)]
    events = [
        CheckpointCommitted(time=at / 10, node=f"n{index}", round=1, step=at, directory="x", seconds=0.01)
        for index in range(500)
        for at in range(1, 50)
    ]
    found = node_timelines(report(tmp_path), own, Picture.of(events))
    assert len(found) == 60
    assert sum(len(line.segments) for line in found) <= 2500
    assert sum(len(line.marks) for line in found) <= 1500


def test_ends_are_those_of_the_report(tmp_path):
    nodes = (NodeSummary(name="a", ending="exited", exit_code=3), NodeSummary(name="b", ending="preempted"))
    own = [*spans("a", ("training", 1.0)), *spans("b", ("training", 1.0)), *spans("c", ("training", 1.0))]
    found = node_timelines(report(tmp_path, nodes=nodes), own, Picture())
    assert {line.node: line.ending for line in found} == {"a": "exited with 3", "b": "preempted", "c": ""}
