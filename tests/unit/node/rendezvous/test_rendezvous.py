"""Nodes that join rounds through a real table and real sockets, each on its own thread."""

from __future__ import annotations

import socket
import threading

import pytest

from azureml_elastic.errors import NodeLeaving, RunFailed, RunSucceeded, UsageError
from azureml_elastic.node.core.actions import Close, Reopen
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY, member_key
from tests.support.rendezvous.hubs import PausableRuntime
from tests.support.rendezvous.nodes import TIMEOUT, Slow
from tests.support.waiting import until


def test_all_nodes_agree_on_one_round(nodes):
    assignments = nodes.join(*(nodes.make(f"node-{k}", 5, 5, slots=2) for k in range(5)))
    assert {assignment.round.number for assignment in assignments} == {1}
    assert sorted(assignment.rank for assignment in assignments) == list(range(5))
    assert len({assignment.store_address for assignment in assignments}) == 1
    assert assignments[0].round.world_size == 10
    (first,) = [assignment for assignment in assignments if assignment.rank == 0]
    assert first.listener.getsockname()[1] == first.store_address[1]
    assert all(assignment.listener is None for assignment in assignments if assignment.rank > 0)


@pytest.mark.parametrize("most", [1, 200])
def test_nodes_of_another_program_with_the_same_run_id_are_refused(nodes, most):
    """Neither do they become members, nor do they take the end of the run for their own."""
    first, other = nodes.make("node-0", 1, most, program="train"), nodes.make("node-1", 1, most, program="evaluate")
    nodes.form(first)
    with pytest.raises(UsageError, match=r"another program.*AZUREML_ELASTIC_STEP"):
        other.join()
    assert first.round_end.write(Close(succeeded=True))
    late = nodes.make("node-2", 1, most, program="evaluate")  # has not read the run's key before
    with pytest.raises(UsageError, match="another program"):
        late.join()
    for program in ("train", None):
        with pytest.raises(RunSucceeded):
            nodes.make("node-3", 1, most, program=program).join()


def test_nobody_waits_for_an_announced_node_of_another_program(nodes):
    nodes.make("node-0", program="train").announce()
    other = nodes.make("node-1", program="evaluate")
    with pytest.raises(UsageError, match="another program"):
        other.announce()
    assert nodes.table.get(member_key("node-1")) is None


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_of_any_rank_form_the_next_round(nodes, victim):
    group = [nodes.make(f"node-{k}", 1, 3) for k in range(3)]
    nodes.form(*group)
    nodes.kill(group[victim])
    survivors = [node for k, node in enumerate(group) if k != victim]
    assignments = nodes.rejoin(*survivors)
    assert [assignment.round.number for assignment in assignments] == [2, 2]
    assert [assignment.rank for assignment in assignments] == [0, 1]
    assert group[victim].node not in {member.node for member in assignments[0].round.members}


def test_a_node_that_joins_again_by_itself_stays_a_member(nodes):
    """As torch's agent does after a worker's failure: it calls the handler again, without ending the round first."""
    group = [nodes.make("node-0", 1, 3, table=Slow(nodes.table, 0.3)), nodes.make("node-1"), nodes.make("node-2")]
    nodes.form(*group)
    (pending,) = nodes.start(group[0])
    nodes.rejoin(*group[1:])
    round_ = pending.result(TIMEOUT).round
    assert (round_.number, len(round_.members)) == (2, 3)


@pytest.fixture
def frozen_candidate(nodes):
    """A candidate of the first round whose process is stopped: it takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        port = hub.getsockname()[1]
        ghost = Member("node-9", "frozen", round=1, host="127.0.0.1", store_port=1, hub_port=port)
        nodes.table.insert(member_key(ghost.node), ghost.to_value())
        yield


@pytest.mark.usefixtures("frozen_candidate")
@pytest.mark.parametrize("leads", [True, False])
def test_a_round_that_a_member_never_connected_to_has_failed_whichever_node_ends_it(nodes, leads):
    nodes.hasten(join_timeout=2)
    pair = [nodes.make(name, 3, 3) for name in ("node-1", "node-2")]
    nodes.join(*pair)
    (ending,) = (node for node in pair if node.machine.leads is leads)
    until(lambda: ending.status().lost)
    assert ending.round_end.write(Reopen("lost node-9", lost=ending.status().lost))
    round_ = ending._rows.read_round()
    assert round_.failed_rounds == 1
    first = ending.membership.assignment.round.members[0]
    assert f"node-9 (127.0.0.1) did not reach {first.node} (127.0.0.1:{first.hub_port}) within 2 s" in round_.reason


def test_rounds_leave_no_threads_behind(nodes, caplog):
    group = [nodes.make(f"node-{k}", 3, 3) for k in range(3)]
    nodes.join(*group)

    def left() -> int:
        return sum(thread.name.startswith(("line-client", "probing")) for thread in threading.enumerate())

    before = left()
    for _ in range(4):
        group[0].round_end.write(Reopen("again"))
        nodes.rejoin(*group)
    until(lambda: left() <= before)
    assert "cannot reach" not in caplog.text


def test_a_failure_reaches_everyone_with_its_message_and_exit_code(nodes):
    first, second = nodes.make("node-0", 2, 2), nodes.make("node-1", 2, 2)
    nodes.join(first, second)
    assert second.round_end.write(Close(succeeded=False, message="ValueError: no such file", exit_code=7))
    until(lambda: first.status().over)
    for node in (first, nodes.make("node-2")):
        with pytest.raises(RunFailed, match="no such file") as failure:
            node.join()
        assert failure.value.exit_code == 7


@pytest.mark.parametrize("pause_s", [0.0, 2.95])
def test_a_leader_that_was_given_up_while_it_did_not_run_blames_nobody(nodes, pause_s):
    nodes.hasten(heartbeat_timeout=3.0)
    runtime = PausableRuntime()
    leader, member = nodes.make("node-0", 2, 2, runtime=runtime), nodes.make("node-1", 2, 2)
    leader.announce()
    nodes.join(leader, member)
    runtime.offset += pause_s
    nodes.kill(member)
    until(lambda: leader.status().broken)
    assert leader.status().was_given_up == bool(pause_s)
    assert leader.status().lost == (set() if pause_s else {"node-1"})


@pytest.fixture
def sealed_while_leaving(nodes):
    """A member, and a candidate that has stopped waiting and is sealed in before it can say that it leaves."""
    nodes.hasten(join_timeout=1, heartbeat_timeout=1)
    noticed = threading.Event()
    leaving = nodes.make("node-1", 2, 2, noticed=noticed)
    (pending,) = nodes.start(leaving)
    until(lambda: (row := nodes.table.get(member_key("node-1"))) is not None and row.value["state"] == "waiting")
    noticed.set()
    leaving.queue.wake()
    with pytest.raises(NodeLeaving):
        pending.result(TIMEOUT)
    member = nodes.make("node-0", 2, 2)
    nodes.join(member)
    return member, leaving


def test_a_node_that_is_sealed_in_while_it_leaves_reopens_the_round(nodes, sealed_while_leaving):
    member, leaving = sealed_while_leaving
    leaving.leave("preempted")
    until(lambda: member.status().over)
    assert not member.status().lost
    round_ = Round.from_value(nodes.table.get(ROUND_KEY).value)
    assert (round_.number, round_.state, round_.expected) == (2, "open", ("node-0",))
    assert "node-1 has left before it could enter: preempted" in round_.reason


@pytest.mark.parametrize(
    ("left", "in_order"),
    [
        ({"state": "left"}, {"node-1"}),
        ({"state": "left", "unreached": ["i-other"]}, set()),
        ({"state": "left", "incarnation": "another"}, set()),
        ({}, set()),
    ],
    ids=["left", "cannot reach rank 0", "another process", "died"],
)
def test_a_member_that_never_entered_is_not_at_fault_if_it_has_left(nodes, sealed_while_leaving, left, in_order):
    """Its own look at the round's row may come before the seal, of which the sealer's look was before it left."""
    member, _ = sealed_while_leaving
    row = nodes.table.get(member_key("node-1"))
    nodes.table.replace(row.key, {**row.value, **left}, row.etag)
    until(lambda: member.status().lost)
    assert member.status().lost == {"node-1"}
    assert member.round_end.left_in_order(frozenset({"node-0", "node-1"})) == in_order
