"""Fault schedules: their notation and the decision when a fault is due."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.errors import ChaosError
from azureml_elastic.local.faults.model import Add, AfterSeconds, AtStep, Freeze, Kill, Preempt, Schedule
from azureml_elastic.local.faults.schedule import (
    ChaosState,
    Due,
    due,
    load_schedule,
    may_add,
    parse_schedule,
    training_seconds,
)

ALL = frozenset({"node-0", "node-1", "node-2"})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill=node-2@step:30", Kill("node-2", AtStep(30))),
        ("kill=rank0@12.5s", Kill("rank0", AfterSeconds(12.5))),
        ("preempt=any@step:1", Preempt("any", AtStep(1), 30.0)),
        ("preempt=node-1@step:30/10s", Preempt("node-1", AtStep(30), 10.0)),
        ("freeze=rank0@0s", Freeze("rank0", AfterSeconds(0.0))),
        ("freeze=any@20s/5s", Freeze("any", AfterSeconds(20.0), 5.0)),
        ("add@step:80", Add(AtStep(80))),
        ("add=2@15s", Add(AfterSeconds(15.0), 2)),
    ],
)
def test_each_form_is_read_and_written_back(text, fault):
    assert parse_schedule(text).faults == (fault,)
    assert parse_schedule(str(fault)).faults == (fault,)


def test_entries_are_separated_by_commas_and_lines_with_comments():
    text = "# a bad day\nkill=rank0@step:3, add@step:5  # and a good one\n\n  freeze=any@1s ,\n"
    assert parse_schedule(text, 7) == Schedule(
        (Kill("rank0", AtStep(3)), Add(AtStep(5)), Freeze("any", AfterSeconds(1.0))), 7
    )


def test_an_existing_file_is_read_and_any_other_text_is_a_schedule(tmp_path):
    path = tmp_path / "schedule.txt"
    path.write_text("kill=any@step:9\n# the end\n")
    assert load_schedule(str(path)).faults == (Kill("any", AtStep(9)),)
    assert load_schedule("kill=any@step:9").faults == (Kill("any", AtStep(9)),)
    assert load_schedule(",".join(["add@1s"] * 2000)).faults == (Add(AfterSeconds(1.0)),) * 2000


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "schedule.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ChaosError, match="cannot be read"):
        load_schedule(str(path))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("explode=any@step:3", "'explode'"),
        ("kill", "VERB=TARGET@WHEN"),
        ("kill=any", "VERB=TARGET@WHEN"),
        ("kill@step:3", "names no node"),
        ("kill=node@step:3", "'node'"),
        ("kill=rank1@step:3", "'rank1'"),
        ("kill=any@step:x", "'step:x'"),
        ("kill=any@step:-1", "'step:-1'"),
        ("kill=any@30", "'30'"),
        ("kill=any@-3s", "'-3s'"),
        ("kill=any@step:3/5s", "'/5s'"),
        ("add@step:3/5s", "'/5s'"),
        ("add=0@step:3", "'0'"),
        ("add=node-1@step:3", "'node-1'"),
        ("preempt=any@step:3/soon", "'soon'"),
        ("freeze=any@step:3/", "''"),
        ("=any@step:3", "VERB=TARGET@WHEN"),
        ("table@step:3", "''"),
        ("table=fire@step:3", "'fire'"),
        ("table=slow:0%@step:3", "0 %"),
        ("table=slow:101%@step:3", "101 %"),
        ("table=outage:50%@step:3", "50 %"),
        ("table=slow:5@step:3", "'slow:5'"),
        ("table=slow@step:3/soon", "'soon'"),
    ],
)
def test_invalid_entries_are_named_with_the_accepted_forms(text, named):
    with pytest.raises(ChaosError, match=re.escape(named)) as caught:
        parse_schedule(text)
    for verb in ("kill=", "preempt=", "freeze=", "add", "table=outage"):
        assert verb in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_a_schedule_or_a_chaos_error(text):
    try:
        schedule = parse_schedule(text)
    except ChaosError:
        return
    assert parse_schedule(str(schedule)).faults == schedule.faults


@pytest.mark.parametrize(
    ("step", "seconds", "expected"),
    [(9, 4.9, []), (10, 4.9, [0]), (9, 5.0, [1]), (11, 6.0, [0, 1]), (10, None, [0])],
)
def test_a_fault_is_due_from_its_time_on(step, seconds, expected):
    schedule = parse_schedule("kill=node-0@step:10,kill=node-1@5s")
    decisions = due(schedule, ChaosState(step=step, seconds=seconds, living=ALL))
    assert [decision.index for decision in decisions] == expected


def test_a_fault_happens_once():
    schedule = parse_schedule("kill=any@step:1")
    assert due(schedule, ChaosState(step=5, living=ALL, fired=frozenset({0}))) == []


def test_rank0_waits_until_its_node_is_known_and_alive():
    schedule = parse_schedule("kill=rank0@step:1")
    assert due(schedule, ChaosState(step=1, living=ALL)) == []
    assert due(schedule, ChaosState(step=1, living=ALL - {"node-2"}, rank0="node-2")) == []
    assert due(schedule, ChaosState(step=1, living=ALL, rank0="node-2"))[0].victim == "node-2"


def test_a_fault_waits_for_a_future_node_but_not_for_an_ended_one():
    schedule = parse_schedule("kill=node-3@step:1")
    assert due(schedule, ChaosState(step=1, living=ALL)) == []
    assert due(schedule, ChaosState(step=1, living=ALL | {"node-3"}))[0].victim == "node-3"
    gone = due(schedule, ChaosState(step=1, living=ALL, gone=frozenset({"node-3"})))
    assert gone == [Due(0, schedule.faults[0], None)]


def test_simultaneous_faults_have_different_targets():
    schedule = parse_schedule("kill=any@step:1,preempt=any@step:1,freeze=any@step:1,kill=any@step:1")
    decisions = due(schedule, ChaosState(step=1, living=ALL))
    assert {decision.victim for decision in decisions} == ALL
    assert len(decisions) == 3


def test_any_is_drawn_by_the_seed():
    def victims(seed):
        schedule = parse_schedule("kill=any@step:1", seed)
        return due(schedule, ChaosState(step=1, living=ALL))[0].victim

    assert all(victims(seed) == victims(seed) for seed in range(5))
    assert {victims(seed) for seed in range(40)} == ALL


@pytest.mark.parametrize(
    ("first_step", "without_session", "expected"),
    [(None, None, None), (None, 90.0, 10.0), (97.0, None, 3.0), (97.0, 90.0, 3.0)],
    ids=["imports, or reads data", "no session", "a session", "a session after all"],
)
def test_seconds_count_from_the_first_step_where_one_is_reported(first_step, without_session, expected):
    assert training_seconds(100.0, first_step, without_session) == expected


def test_added_nodes_need_no_victim():
    assert due(parse_schedule("add=2@0s"), ChaosState(seconds=0.0)) == [Due(0, Add(AfterSeconds(0.0), 2))]


@pytest.mark.parametrize(
    ("text", "state", "expected"),
    [
        ("add@10s", ChaosState(seconds=1.0), True),
        ("add@10s", ChaosState(seconds=None), False),
        ("add@10s", ChaosState(seconds=11.0, fired=frozenset({0})), False),
        ("add@step:10", ChaosState(step=9, seconds=1.0), False),
        ("add@step:10", ChaosState(step=10, seconds=1.0), True),
        ("kill=any@10s", ChaosState(seconds=1.0), False),
    ],
)
def test_without_nodes_only_faults_at_a_time_add_new_ones(text, state, expected):
    assert may_add(parse_schedule(text), state) is expected


def test_table_faults_are_due_with_or_without_nodes():
    schedule = parse_schedule("table=slow:20%@10s/5s,table=outage@step:3,table=any@0s")
    assert str(schedule) == "table=slow:20%@10s/5s,table=outage@step:3,table=any@0s"
    assert schedule.disturbs_table
    assert not parse_schedule("kill=any@step:1,add@step:2").disturbs_table
    decisions = due(schedule, ChaosState(step=3, seconds=9.0))
    assert [(decision.index, decision.victim) for decision in decisions] == [(1, None), (2, None)]
    slow, outage, _ = (fault.disturbance for fault in schedule.faults)
    assert (slow.kind, slow.share, outage.kind, outage.share) == ("slow", 0.2, "outage", 1.0)
