"""Nodes that join rounds through a real table and real sockets, each on its own thread."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from azureml_elastic.errors import NodeLeaving, RunFailed, RunSucceeded, UsageError
from azureml_elastic.node.core.actions import Close, Reopen
from azureml_elastic.node.core.events import HubSent
from azureml_elastic.node.core.failures import FailureRecord
from azureml_elastic.node.core.messages import RoundChanged, Watch
from azureml_elastic.node.core.round import Member, Round, reopened
from azureml_elastic.node.rendezvous.link import FromLink, Link
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY, RUN_KEY, member_key
from tests.support.rendezvous.hubs import PausableRuntime, hub_at, make_context
from tests.support.rendezvous.nodes import TIMEOUT, TIMINGS, Slow
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


def test_a_join_costs_one_write_a_node_and_one_for_the_seal(nodes):
    assignments = nodes.join(*(nodes.make(f"node-{k:02d}", 40, 40) for k in range(40)))
    assert {assignment.round.number for assignment in assignments} == {1}
    calls = nodes.table.calls
    # 40 members, the round, the table heartbeat of rank 0.
    assert calls["insert"] - nodes.table.keys.count(RUN_KEY) == 42
    assert calls.get("replace", 0) <= 1


def test_the_minimum_starts_without_waiting_for_more(nodes):
    started = time.monotonic()
    nodes.join(nodes.make("node-0", 1, 8))
    assert time.monotonic() - started < TIMINGS.settle_timeout.total_seconds() / 2


def test_announced_nodes_are_waited_for(nodes):
    early, late = nodes.make("node-0"), nodes.make("node-1")
    early.announce()
    late.announce()
    (pending,) = nodes.start(early)
    (assignment,) = nodes.join(late)
    assert len(assignment.round.members) == 2
    assert pending.result(TIMEOUT).rank == 0


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


def test_a_newcomer_waits_is_seen_and_gets_in(nodes):
    first = nodes.make("node-0")
    nodes.join(first)
    newcomer = nodes.make("node-1")
    (pending,) = nodes.start(newcomer)
    until(lambda: first.status().waiting)
    assert first.status().waiting == {"node-1"}
    assert not first.status().broken
    first.round_end.write(Reopen("joining"))
    (assignment,) = nodes.rejoin(first)
    assert assignment.rank == 0
    assert pending.result(TIMEOUT).rank == 1


def test_a_spare_beyond_the_maximum_waits_and_replaces_the_lost(nodes):
    group = [nodes.make(f"node-{k}", 1, 2) for k in range(2)]
    for node in group:
        node.announce()
    nodes.join(*group)
    spare = nodes.make("node-2", 1, 2)
    (pending,) = nodes.start(spare)
    until(lambda: group[0].hub.view().waiting)
    assert group[0].status().waiting == frozenset()
    nodes.kill(group[1])
    (assignment,) = nodes.rejoin(group[0])
    assert [member.node for member in assignment.round.members] == ["node-0", "node-2"]
    assert pending.result(TIMEOUT).rank == 1


def test_a_node_takes_over_when_all_others_died(nodes):
    group = [nodes.make(f"node-{k}", 1, 2) for k in range(2)]
    for node in group:
        node.announce()
    nodes.join(*group)
    (pending,) = nodes.start(nodes.make("node-2", 1, 2))
    until(lambda: group[0].hub.view().waiting or group[1].hub.view().waiting)
    for node in group:
        nodes.kill(node)
    assignment = pending.result(TIMEOUT)
    assert (assignment.rank, [member.node for member in assignment.round.members]) == (0, ["node-2"])


@pytest.mark.parametrize(("dead", "alive"), [("node-0", ["node-1", "node-2"]), ("node-9", ["node-1"])])
def test_a_candidate_that_has_died_is_left_out(nodes, dead, alive):
    """Its row says that it waits, and its machine refuses connections to its hub."""
    ghost = Member(dead, "gone", round=1, host="127.0.0.1", store_port=1, hub_port=1)
    nodes.table.insert(member_key(ghost.node), ghost.to_value())
    assignments = nodes.join(*(nodes.make(name, len(alive), 3) for name in alive))
    assert {assignment.round.number for assignment in assignments} == {1}
    assert [member.node for member in assignments[0].round.members] == alive


class Deaf:
    """A listener that accepts connections but never answers, like a stopped process."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def close(self):
        self._listener.close()


@pytest.fixture
def frozen(nodes):
    """Return a function that has a candidate of the first round be frozen."""
    deaf = Deaf()

    def freeze(name: str) -> None:
        ghost = Member(name, "frozen", round=1, host="127.0.0.1", store_port=1, hub_port=deaf.port)
        nodes.table.insert(member_key(ghost.node), ghost.to_value())

    yield freeze
    deaf.close()


def test_a_candidate_that_is_frozen_and_should_seal_is_left_out(nodes, frozen):
    nodes.hasten(heartbeat_timeout=2)
    frozen("node-0")
    assignments = nodes.join(nodes.make("node-1", 2, 3), nodes.make("node-2", 2, 3))
    assert {assignment.round.number for assignment in assignments} == {1}
    assert [member.node for member in assignments[0].round.members] == ["node-1", "node-2"]


def test_a_member_that_never_comes_to_its_round_is_noticed(nodes, frozen):
    nodes.hasten(join_timeout=2)
    frozen("node-9")
    first = nodes.make("node-1", 1, 2)
    (assignment,) = nodes.join(first)
    assert [member.node for member in assignment.round.members] == ["node-1", "node-9"]
    (assignment,) = nodes.rejoin(first)
    assert [member.node for member in assignment.round.members] == ["node-1"]


def test_rank_0_tells_its_members_that_another_node_has_ended_the_round(nodes):
    group = [nodes.make(name, 3, 3) for name in ("node-1", "node-2", "node-3")]
    round_ = nodes.join(*group)[0].round
    leader, cut_off, other = sorted(group, key=lambda node: round_.rank_of(node.node, node.incarnation))
    assert cut_off._rows.end_round(round_.number, reopened(round_, "lost rank 0", {leader.node}))
    assert leader.round_end.write(Reopen("lost rank 1", lost=frozenset({cut_off.node}))) is None
    until(lambda: other.status().over)


def test_a_round_whose_leader_is_lost_too_was_is_no_failed_round(nodes, frozen):
    nodes.hasten(join_timeout=2)
    frozen("node-9")
    pair = [nodes.make(name, 3, 3) for name in ("node-1", "node-2")]
    nodes.join(*pair)
    (leader,), (other,) = ([node for node in pair if node.machine.leads is leads] for leads in (True, False))
    until(lambda: other.status().lost)
    assert other.round_end.write(Reopen("lost two", lost=other.status().lost | {leader.node}))
    assert other._rows.read_round().failed_rounds == 0


@pytest.mark.parametrize("leads", [True, False])
def test_a_round_that_a_member_never_connected_to_has_failed_whichever_node_ends_it(nodes, frozen, leads):
    nodes.hasten(join_timeout=2)
    frozen("node-9")
    pair = [nodes.make(name, 3, 3) for name in ("node-1", "node-2")]
    nodes.join(*pair)
    (ending,) = (node for node in pair if node.machine.leads is leads)
    until(lambda: ending.status().lost)
    assert ending.round_end.write(Reopen("lost node-9", lost=ending.status().lost))
    round_ = ending._rows.read_round()
    assert round_.failed_rounds == 1
    first = ending.membership.assignment.round.members[0]
    assert f"node-9 (127.0.0.1) did not reach {first.node} (127.0.0.1:{first.hub_port}) within 2 s" in round_.reason


def test_a_silent_member_is_lost(nodes):
    nodes.hasten(heartbeat_timeout=2)
    first, second = nodes.make("node-0", 2, 2), nodes.make("node-1", 2, 2)
    nodes.join(first, second)
    leader, silent = (first, second) if first.machine.leads else (second, first)
    silent.membership.link._on_tick = lambda: None
    silent.membership.link._client._loop._on_tick = lambda: None
    until(lambda: leader.status().lost)
    assert leader.status().lost == {silent.node}


def test_a_node_that_closes_its_connection_is_lost(nodes):
    first, second = nodes.make("node-0", 2, 2), nodes.make("node-1", 2, 2)
    nodes.join(first, second)
    leader, other = (first, second) if first.machine.leads else (second, first)
    other.shutdown()
    until(lambda: leader.status().lost)
    assert leader.status().lost == {other.node}


def test_nodes_that_cannot_reach_each_other_fail_the_run_with_the_address(nodes):
    pair = [nodes.make(f"node-{k}", 2, 2) for k in range(2)]
    for node in pair:
        node.machine.me = replace(node.machine.me, host="127.0.0.99")  # where neither of them listens
    for pending in nodes.start(*pair):
        with pytest.raises(RunFailed, match=r"cannot reach node-\d at 127\.0\.0\.99"):
            pending.result(TIMEOUT)


def test_a_newcomer_that_missed_the_seal_is_made_room_for_when_it_sends_that_it_waits(nodes):
    nodes.hasten(rejoin_timeout=1)
    first = nodes.make("node-0", 1, 2)
    nodes.join(first)
    context = make_context(TIMINGS, node="node-1")
    context.authenticator.key = first._context.authenticator.key
    slow = Link(context, hub_at(first.hub.port), Watch(1))
    until(lambda: first.status().waiting)
    first.round_end.write(Reopen("joining"))
    (assignment,) = nodes.rejoin(first)
    assert [member.node for member in assignment.round.members] == ["node-0"]
    sent = FromLink(slow, HubSent(RoundChanged(assignment.round)))
    until(lambda: sent in context.queue.take())
    assert first.hub.view().waiting == frozenset()  # its connection alone proves nothing
    slow.send(Watch(2))
    until(lambda: first.status().waiting == {"node-1"}, timeout=14)  # the next wait would be 15 s
    slow.close()


def test_a_leader_that_was_given_up_learns_it(nodes):
    first = nodes.make("node-0")
    nodes.join(first)
    row = nodes.table.get(ROUND_KEY)
    newer = reopened(Round.from_value(row.value), "no sign of life", lost=["node-0"])
    nodes.table.replace(ROUND_KEY, newer.to_value(), row.etag)
    (assignment,) = nodes.join(nodes.make("node-1"))
    assert assignment.round.number == 2
    until(lambda: first.status().over)


def test_rounds_leave_no_threads_behind(nodes):
    group = [nodes.make(f"node-{k}", 3, 3) for k in range(3)]
    nodes.join(*group)

    def links() -> int:
        return sum(thread.name.startswith("line-client") for thread in threading.enumerate())

    before = links()
    for _ in range(4):
        group[0].round_end.write(Reopen("again"))
        nodes.rejoin(*group)
    until(lambda: links() <= before)


def test_the_run_is_over_for_late_nodes(nodes):
    first = nodes.make("node-0")
    nodes.join(first)
    (waiting,) = nodes.start(nodes.make("node-1", 1, 1))
    until(lambda: first.hub.view().waiting)
    assert first.round_end.write(Close(succeeded=True))
    with pytest.raises(RunSucceeded):
        nodes.make("node-2").join()
    with pytest.raises(RunSucceeded):
        waiting.result(TIMEOUT)


def test_a_failure_reaches_everyone_with_its_message_and_exit_code(nodes):
    first, second = nodes.make("node-0", 2, 2), nodes.make("node-1", 2, 2)
    nodes.join(first, second)
    assert second.round_end.write(Close(succeeded=False, message="ValueError: no such file", exit_code=7))
    until(lambda: first.status().over)
    for node in (first, nodes.make("node-2")):
        with pytest.raises(RunFailed, match="no such file") as failure:
            node.join()
        assert failure.value.exit_code == 7


def test_one_incident_is_charged_once(nodes):
    group = [nodes.make(f"node-{k}", 3, 3) for k in range(3)]
    nodes.join(*group)
    failures = {node: (FailureRecord("same", "user", 5, node.node, rank, 1),) for rank, node in enumerate(group)}
    reopening = [nodes.pool.submit(node.round_end.write, Reopen("crash", failures=failures[node])) for node in group]
    charged = [future.result(TIMEOUT) is not None for future in reopening]
    assert sorted(charged) == [False, False, True]
    written = failures[group[charged.index(True)]]
    assert Round.from_value(nodes.table.get(ROUND_KEY).value).failures == written
    assert {assignment.round.failures for assignment in nodes.join(*group)} == {written}


def test_failures_grow_older_by_the_duration_of_rounds(nodes):
    pair = [nodes.make(f"node-{k}", 2, 2) for k in range(2)]
    nodes.join(*pair)
    known = FailureRecord("same", "user", 5, "node-0", 0, 1)
    assert pair[0].round_end.write(Reopen("crash", failures=(known,)))
    started = time.monotonic()
    nodes.rejoin(*pair)
    until(lambda: pair[0].clock() - pair[0].machine.entered > 0.2)
    assert pair[0].round_end.write(Reopen("joining"))
    (first, _) = nodes.rejoin(*pair)
    assert 0.2 < first.round.failures[0].age_seconds < time.monotonic() - started
    assert pair[1].round_end.write(Close(succeeded=False, message="x", exit_code=1))
    (last,) = Round.from_value(nodes.table.get(ROUND_KEY).value).failures
    assert last.age_seconds >= first.round.failures[0].age_seconds


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


def test_another_incarnation_of_a_member_is_a_newcomer(nodes):
    first, second = nodes.make("node-0", 1, 3), nodes.make("node-1", 1, 3)
    first.announce()
    second.announce()
    nodes.join(first, second)
    reborn = nodes.make("node-1", 1, 3)
    (pending,) = nodes.start(reborn)
    nodes.kill(second)
    nodes.rejoin(first)
    until(lambda: first.status().waiting or pending.done())
    if not pending.done():
        first.round_end.write(Reopen("joining"))
        nodes.rejoin(first)
    assert pending.result(TIMEOUT).round.rank_of("node-1", reborn.incarnation) is not None


def test_a_wait_can_be_cancelled(nodes):
    (pending,) = nodes.start(nodes.make("node-0", 2, 2))
    until(lambda: nodes.table.get(member_key("node-0")) is not None)
    nodes.over.set()
    with pytest.raises(NodeLeaving):
        pending.result(TIMEOUT)
