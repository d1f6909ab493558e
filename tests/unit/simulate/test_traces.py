"""Traces are read from both shapes, mistakes are named by line, and what is written is read again."""

from __future__ import annotations

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.simulate.traces import Change, Hazard, from_counts, read_trace, synthetic_trace, write_trace


def test_csv_names_machines_in_the_order_of_appearance_and_ignores_repeated_events(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time,node,event\n0,b,up\n0,a,down\n5,b,up\n10.5,b,down\n12,a,UP\n\n")
    trace = read_trace(path)
    assert trace.changes == (Change(0, 0, True), Change(10.5, 0, False), Change(12, 1, True))
    assert (trace.machines, trace.seconds) == (2, 12)
    assert trace.up_seconds() == 10.5


@pytest.mark.parametrize(
    "text",
    ['{"gap_seconds": 60, "counts": [1, 3, 2]}', '{"metadata": {"gap_seconds": 60}, "data": [1, 3, 2]}'],
)
def test_json_counts_lose_the_last_machine_first(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    trace = read_trace(path)
    assert trace == from_counts(60, [1, 3, 2])
    assert trace.changes[-1] == Change(120, 2, False)
    assert trace.up_seconds() == 60 * 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,a,up\n5,a", "line 2 has 2 values"),
        ("x,a,up", "the time of line 1, 'x'"),
        ("5,a,up\n4,a,down", "line 2, 4, is before"),
        ("0,a,left", "'left', is neither"),
        ("0,,up", "line 1 names no node"),
        ("nan,a,up", "no number of seconds"),
        ("", "no available machine"),
        ("0,a,down", "no available machine"),
        ('{"counts": [1]}', "gap_seconds, None"),
        ('{"gap_seconds": 0, "counts": [1]}', "gap_seconds=0"),
        ('{"gap_seconds": 9, "counts": [1, -1]}', "counts[1]=-1"),
        ('{"gap_seconds": 9}', "counts is no list"),
        ("{", "is invalid"),
        ("[1]", "without the seconds"),
    ],
)
def test_mistakes_are_named_with_their_line_and_the_shapes(tmp_path, text, words):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert words in str(caught.value)
    assert "gap_seconds" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_a_synthetic_trace_is_the_same_for_a_seed_and_is_read_again_as_written(tmp_path):
    hazard = Hazard(loss_every=3600, back_after=600, reclaim_every=7200, reclaim_share=0.5, reclaim_lasts=1800)
    trace = synthetic_trace(hazard, 4, 86400, seed=3)
    assert trace == synthetic_trace(hazard, 4, 86400, seed=3)
    assert trace != synthetic_trace(hazard, 4, 86400, seed=4)
    write_trace(trace, tmp_path / "trace.csv")
    again = read_trace(tmp_path / "trace.csv")
    assert [(each.machine, each.up) for each in again.changes] == [(each.machine, each.up) for each in trace.changes]
    assert again.up_seconds() == pytest.approx(trace.up_seconds(), rel=0.05)


def test_the_share_of_available_time_follows_from_the_rates():
    trace = synthetic_trace(Hazard(loss_every=3000, back_after=1000), 50, 10 * 86400, seed=1)
    assert trace.up_seconds() / (50 * trace.seconds) == pytest.approx(0.75, rel=0.05)


def test_a_reclaim_event_takes_many_machines_at_one_time():
    trace = synthetic_trace(Hazard(reclaim_every=36000, reclaim_share=0.5), 32, 5 * 86400, seed=1)
    losses = [change.time for change in trace.changes if not change.up]
    assert max(losses.count(time) for time in losses) > 8


def test_one_more_machine_changes_no_other():
    hazard = Hazard(loss_every=3600, reclaim_every=7200)
    few, many = (synthetic_trace(hazard, machines, 86400, seed=2) for machines in (3, 4))
    assert [change for change in many.changes if change.machine < 3] == list(few.changes)


@pytest.mark.parametrize("fields", [{"loss_every": 0}, {"back_after": -1}, {"reclaim_share": 1.5}])
def test_a_hazard_out_of_range_is_refused(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        Hazard(**fields)


def test_an_empty_trace_is_refused():
    with pytest.raises(UsageError, match="empty"):
        synthetic_trace(Hazard(), 0, 60)
