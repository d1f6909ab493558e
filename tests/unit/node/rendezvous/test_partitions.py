"""Nodes that cannot reach each other, in simulated time: which are left out, what is reported, and what it costs."""

from __future__ import annotations

import itertools
import logging
import random

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.failures import FailureRecord
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.rendezvous.row_keys import member_key
from tests.support.rendezvous.simulation import Cluster

TIMEOUT_S = 300.0


def name(number: int) -> str:
    return f"node-{number:02d}"


def cut_off(nodes: Cluster, number: int) -> None:
    for other in range(len(nodes.nodes)):
        if other != number:
            nodes.block(name(number), name(other))


def in_round(nodes: Cluster) -> set[str]:
    return {node.name for node in nodes.nodes if node.in_round}


def run_to(nodes: Cluster, members: set[str], limit_s: float) -> float:
    """Run until exactly these have assignments in one and the same round, and return the moment."""

    def there() -> bool:
        inside = [node for node in nodes.nodes if node.in_round]
        return (
            {node.name for node in inside} == members
            and len({node.joined[-1].number for node in inside}) == 1
            and {member.node for member in inside[0].joined[-1].members} == members
        )

    return nodes.run(there, limit_s)


@pytest.mark.parametrize("victim", range(5))
def test_a_node_that_is_cut_off_is_left_out_and_disturbs_nobody_until_the_network_is_mended(cluster, victim):
    nodes = cluster(5, 2)
    cut_off(nodes, victim)
    others = {name(number) for number in range(5)} - {name(victim)}
    assert run_to(nodes, others, 60.0) <= 10.0
    rounds = len(nodes.rounds())
    nodes.pass_time(10.0)  # the one that is left out learns of it
    writes = nodes.most_writes()
    nodes.pass_time(290.0)
    assert in_round(nodes) == others
    assert len(nodes.rounds()) == rounds, "the round that works goes on"
    assert nodes.most_writes() == writes
    nodes.blocked.clear()
    mended = nodes.scheduler.now
    assert nodes.settle(TIMEOUT_S, 5) - mended <= 70.0, "it gets in"
    nodes.verify()


def test_a_node_that_is_cut_off_does_not_slow_down_a_later_round(cluster):
    nodes = cluster(5, 2)
    cut_off(nodes, 3)
    run_to(nodes, {name(number) for number in (0, 1, 2, 4)}, 60.0)
    nodes.pass_time(30.0)
    victim = nodes.nodes[0]
    lost_at = nodes.scheduler.now + 0.1
    nodes.at(lost_at, victim.kill)
    nodes.run(lambda: victim.dead, 1.0)
    assert run_to(nodes, {name(number) for number in (1, 2, 4)}, 60.0) - lost_at <= 1.0
    nodes.verify()


def test_one_that_gets_through_in_time_stays_a_member_and_is_waited_for_again(cluster):
    nodes = cluster(0, 0)
    for number in range(3):
        nodes.add(name(number), Limits(3, 3), arrives_at=number // 2)  # the first two have met when the third one comes
    nodes.at(0.5, lambda: nodes.block(name(1), name(0), both=False))
    nodes.at(5.0, nodes.blocked.clear)
    assert 5.0 <= run_to(nodes, {name(0), name(1), name(2)}, 60.0) <= 8.0
    assert [round_.number for round_ in nodes.rounds() if round_.state == "sealed"] == [1]
    states = [write.value["state"] for write in nodes.storage.writes if write.key == member_key(name(1))]
    assert states == ["starting", "waiting", "left", "waiting"]
    leader = next(node for node in nodes.nodes if node.rendezvous.machine.leads)
    leader.break_round()
    nodes.pass_time(5.0)
    assert in_round(nodes) == {name(0), name(1), name(2)}
    assert [round_.number for round_ in nodes.rounds() if round_.state == "sealed"] == [1, 2]
    nodes.verify()


def test_one_that_others_cannot_reach_although_it_reaches_them_is_left_out_with_a_log_line(cluster, caplog):
    """A firewall that lets out but not in: nothing would come of its being rank 0, or of workers that connect to it."""
    nodes = cluster(3, 2)
    for number in (1, 2):
        nodes.block(name(number), name(0), both=False)
    assert run_to(nodes, {name(1), name(2)}, 60.0) <= 10.0
    rounds = len(nodes.rounds())
    nodes.pass_time(60.0)
    assert len(nodes.rounds()) == rounds
    assert "makes no room for node-00" in caplog.text
    nodes.verify()


def test_below_the_minimum_the_run_fails_after_its_limit_and_says_who_cannot_reach_whom(cluster, caplog):
    caplog.set_level(logging.WARNING)
    nodes = cluster(3, 3, timings=RendezvousTimings(max_failed_rounds=4))
    cut_off(nodes, 2)
    nodes.run(lambda: bool(nodes.rounds()) and nodes.rounds()[-1].state == "failed", 120.0)
    message = nodes.rounds()[-1].message
    assert message.startswith("4 rounds in a row broke because nodes could not reach each other")
    assert "node-00 (host-of-node-00) cannot reach node-02 (host-of-node-02:" in message
    assert "connection timed out after" in message
    warnings = [record for record in caplog.records if "node-02 (host-of-node-02) cannot reach" in record.getMessage()]
    assert warnings


@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
def test_of_a_pair_of_members_one_stays_out_until_they_reach_each_other(cluster, caplog, both):
    nodes = cluster(4, 2)
    nodes.block(name(2), name(3), both=both)
    three = {name(0), name(1), name(2)}
    assert run_to(nodes, three, 60.0) <= 10.0
    assert "node-02 (host-of-node-02) cannot reach node-03 (host-of-node-03:" in caplog.text
    rounds = len(nodes.rounds())
    nodes.nodes[0].break_round()
    nodes.pass_time(100.0)
    assert in_round(nodes) == three
    assert len(nodes.rounds()) == rounds + 2, "whatever ended the round"
    nodes.blocked.clear()
    mended = nodes.scheduler.now
    assert nodes.settle(TIMEOUT_S, 4) - mended <= 70.0
    nodes.verify()


@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
def test_a_pair_that_is_separated_while_a_round_runs_is_found_when_that_has_failed(cluster, both):
    nodes = cluster(4, 2)
    assert nodes.settle(60.0, 4) <= 10.0
    nodes.block(name(3), name(2), both=both)
    nodes.nodes[0].break_round(failures=(FailureRecord("hang", "hang", 7, name(0), 0, 1),))
    run_to(nodes, {name(0), name(1), name(2)}, 60.0)
    nodes.verify()


def test_many_pairs_are_found_in_one_failed_round(cluster):
    """All but rank 0 are in two groups: one member alone would find the pairs of its own."""
    nodes = cluster(12, 2)
    for one, other in itertools.product(range(1, 7), range(7, 12)):
        nodes.block(name(one), name(other))
    run_to(nodes, {name(number) for number in range(7)}, 30.0)
    assert sum(round_.state == "sealed" for round_ in nodes.rounds()) <= 3
    nodes.verify()


def test_a_pair_that_was_separated_while_it_trained_is_found_after_a_loss(cluster):
    nodes = cluster(4, 2)
    assert nodes.settle(60.0, 4) <= 10.0
    nodes.block(name(2), name(3))
    victim, lost_at = nodes.nodes[1], nodes.scheduler.now + 0.1
    nodes.at(lost_at, victim.kill)
    nodes.run(lambda: victim.dead, 1.0)
    assert run_to(nodes, {name(0), name(2)}, 60.0) - lost_at <= 5.0
    nodes.verify()


@pytest.mark.parametrize("seed", range(12))
def test_however_the_network_is_divided_the_round_that_stays_is_one_whose_members_reach_rank_0(cluster, seed):
    choose = random.Random(seed)
    count = choose.randint(2, 12)
    groups = choose.randint(2, 3)
    side = [choose.randrange(groups) for _ in range(count)]
    largest = max(side.count(group) for group in range(groups))
    nodes = cluster(count, choose.randint(1, largest), seed=seed)
    for one, other in itertools.combinations(range(count), 2):
        if side[one] != side[other]:
            nodes.block(name(one), name(other), both=choose.random() < 0.8)
    nodes.pass_time(180.0)
    rounds = len(nodes.rounds())
    nodes.pass_time(120.0)
    assert len(nodes.rounds()) == rounds, "it is stable"
    last = nodes.rounds()[-1]
    assert last.state == "sealed"
    assert in_round(nodes) >= {member.node for member in last.members}
    assert all((member.node, last.members[0].node) not in nodes.blocked for member in last.members)
    nodes.verify()
