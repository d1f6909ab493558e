"""The state of a run as its table shows it, written by the rendezvous' own rows."""

from dataclasses import replace

import pytest

from azureml_elastic.errors import TableError
from azureml_elastic.ledger.events import NodeStarted
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.records.observation import read_run_state
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY, member_key
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer

FIRST, SECOND, SPARE, GONE = (
    Member("a", "1", round=2, slots=2),
    Member("b", "2", round=2, slots=2),
    Member("c", "3", round=2),
    Member("d", "4", state="left", round=1, reason="preempted"),
)


def write_nodes(table, *members):
    for number, member in enumerate(members):
        table.insert(member_key(member.node), member.to_value())
        started = NodeStarted(time=0, node=member.node, host="h", pid=1, job=f"job-{member.node}")
        table.insert(f"event.000000.{member.node}.x.{number:06d}", started.model_dump(mode="json"))


def test_a_run_without_a_row_has_no_state(table):
    assert read_run_state(table) is None


@pytest.mark.parametrize("key", [ROUND_KEY, member_key("a")])
def test_a_row_of_another_program_is_an_error_that_names_it(table, key):
    table.insert(key, {"state": "a state of its own"})
    with pytest.raises(TableError, match=f"Row '{key}' of the table holds no value of this library"):
        read_run_state(table)


def test_nodes_that_start_are_no_round_yet(table):
    write_nodes(table, replace(FIRST, state="starting"))
    state = read_run_state(table)
    assert state.headline == "Round 1 waits for its nodes"
    assert state.progress == "no checkpoint yet"
    assert [(node.name, node.state, node.rank) for node in state.nodes] == [("a", "starting", None)]
    assert state.leading_job is None


def test_a_sealed_round_shows_its_members_and_the_others(table):
    write_nodes(table, SPARE, GONE, FIRST, SECOND)
    table.insert(ROUND_KEY, Round(2, "sealed", (SECOND, FIRST), losses=1).to_value())
    table.insert(TABLE_HEARTBEAT_KEY, {"round": 2, "beats": 7, "by": "2", "step": 40, "steps": 100})
    pointer = CheckpointPointer(table, 2, "2")
    pointer.take_over()
    pointer.commit({"step": 30, "directory": "x"})
    state = read_run_state(table)
    assert state.headline == "Round 2: world size 4 on 2 nodes"
    assert state.progress == "step 40 of 100, checkpoint of step 30, losses of nodes or workers: 1"
    assert [(node.name, node.rank, node.state, node.reason) for node in state.nodes] == [
        ("b", 0, "in round 2", ""),
        ("a", 1, "in round 2", ""),
        ("c", None, "waiting", ""),
        ("d", None, "left", "preempted"),
    ]
    assert state.leading_job == "job-b"


def test_a_run_says_what_a_node_waits_for_while_it_trains(table):
    write_nodes(table, FIRST, SPARE)
    etag = table.insert(ROUND_KEY, Round(2, "sealed", (FIRST,)).to_value())
    table.insert(TABLE_HEARTBEAT_KEY, {"round": 2, "beats": 7, "by": "1", "waits": "c: waiting for the next save"})
    assert read_run_state(table).waits == "c: waiting for the next save"
    table.replace(ROUND_KEY, Round(3, "open", previous=("a",)).to_value(), etag)
    assert not read_run_state(table).waits


def test_the_ends_of_a_run_and_the_pause_between_two_rounds(table):
    write_nodes(table, FIRST)
    etag = table.insert(ROUND_KEY, Round(3, "open", previous=("a",), reason="lost b").to_value())
    assert read_run_state(table).headline == "Round 3 waits for its nodes, after: lost b"
    table.replace(ROUND_KEY, Round(3, "failed", (FIRST,), message="no memory").to_value(), etag)
    assert read_run_state(table).headline == "The run failed in round 3: no memory"
