"""Hundreds of nodes in simulated time, undisturbed and with every fault that can be thought of.

``benchmarks/joining.py`` does the same with a thousand.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.round import Limits, Round
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY, member_key
from tests.support.rendezvous.simulation import Cluster, Costs, Fault, Node, Write

VERY_MANY = 1000
MANY = 200
LIMIT_S = 3.0  # from the arrival of all until they are in one round
TIMEOUT_S = 300.0


def storm(cluster: Cluster, arrivals: list[float], minimum: int) -> float:
    """Let nodes arrive, check everything, and return how long the last one has waited."""
    for number, arrives_at in enumerate(arrivals):
        cluster.add(f"node-{number:04d}", Limits(minimum, len(arrivals)), arrives_at)
    settled = cluster.settle(max(arrivals) + TIMEOUT_S, len(arrivals))
    cluster.verify()
    assert len(cluster.rounds()[-1].members) == len(arrivals)
    return settled - max(arrivals)


def test_all_come_at_once(cluster):
    nodes = cluster()
    assert storm(nodes, [0.0] * VERY_MANY, VERY_MANY) <= LIMIT_S
    assert nodes.conflicts == []
    assert nodes.most_writes() == 2  # that it comes, that it is there
    # One look for each node, some for those that seal or come before any row, and one for the run's key, which is made
    # while they come; nobody reads the round that was sealed. A look has two pages, as there are 1,000
    # nodes and the key.
    assert nodes.storage.calls["query"] <= 2 * VERY_MANY + 40
    assert nodes.storage.calls["get"] <= VERY_MANY + 100
    assert [round_.number for round_ in nodes.rounds()] == [1]


@pytest.mark.parametrize(("count", "minimum"), [(MANY, 1), (MANY, MANY // 2), (MANY, MANY), (2 * MANY, 2 * MANY)])
def test_they_come_within_a_second(cluster, count, minimum):
    nodes = cluster()
    arrivals = [number / count for number in range(count)]
    assert storm(nodes, random.Random(minimum).sample(arrivals, count), minimum) <= LIMIT_S
    assert nodes.conflicts == []
    assert nodes.most_writes() <= 3


@pytest.mark.parametrize("seed", range(4))
def test_they_come_at_random(cluster, seed):
    choose = random.Random(seed)
    nodes = cluster(seed=seed)
    # Bunches: some start the run, the others come while it runs, some of these while it makes room.
    bunches = [choose.uniform(0, 6) for _ in range(4)]
    arrivals = [0.0, *(choose.choice(bunches) + choose.expovariate(4) for _ in range(MANY // 2))]
    assert storm(nodes, arrivals, choose.randint(1, MANY // 4)) <= LIMIT_S
    assert nodes.conflicts == []
    assert nodes.most_writes() <= 3


def test_a_running_round_grows_to_all_in_one_step(cluster):
    nodes = cluster()
    assert storm(nodes, [0.0, *(3.0 + number / MANY for number in range(MANY - 1))], 1) <= LIMIT_S
    assert nodes.conflicts == []
    assert [len(round_.members) for round_ in nodes.rounds() if round_.state == "sealed"] == [1, MANY]
    assert nodes.most_writes() == 2  # those that are already there only say that they go on


def test_a_large_round_that_loses_rank_0_asks_little_of_the_table(cluster):
    nodes = cluster()
    storm(nodes, [0.0] * MANY, 1)
    calls = nodes.storage.calls.total()
    first = next(node for node in nodes.nodes if node.rendezvous.machine.leads)
    lost_at = nodes.scheduler.now + 0.1
    nodes.at(lost_at, first.kill)
    nodes.run(lambda: first.dead, 1.0)
    assert nodes.settle(TIMEOUT_S) - lost_at <= 1.0
    nodes.verify()
    # One of the survivors reopens, looks, seals, and takes over the sign of life; the others only say that they go on.
    assert nodes.storage.calls.total() - calls <= 15


def test_the_time_is_that_of_the_queue_in_front_of_the_table(cluster):
    slow = cluster(costs=replace(Costs(), calls_per_second=100.0))
    assert storm(slow, [0.0] * 50, 50) >= 3 * 50 / 100  # announce, look, ask for a place


def test_the_same_seed_is_the_same_run(cluster):
    def trace(nodes: Cluster) -> list[tuple]:
        choose = random.Random(5)
        storm(nodes, [choose.uniform(0, 2) for _ in range(30)], 5)
        return [(write.when, write.node, write.key) for write in nodes.storage.writes]

    assert trace(cluster(fault=unreliable)) == trace(cluster(fault=unreliable))


# --- faults ----------------------------------------------------------------------------------------------------------


def unreliable(choose: random.Random, _: float, kind: str, __: Node) -> Fault | None:
    """Spoil one call in ten: throttled, timed out, or carried out with the answer lost."""
    chance = choose.random()
    if chance < 0.05:
        return Fault(done=False, seconds=choose.choice([0.05, 2.0, 10.0]))
    if chance < 0.10 and kind != "query":
        return Fault(done=True, seconds=choose.choice([0.05, 2.0, 10.0]))
    return None


def outage(begins: float) -> object:
    """Return a table that is away for half a minute, in the middle of which calls get through but not their answers."""

    def fault(choose: random.Random, now: float, _: str, __: Node) -> Fault | None:
        if not begins <= now < begins + 30:
            return None
        return Fault(done=choose.random() < 0.1, seconds=1.0)

    return fault


def disturb(nodes: Cluster, choose: random.Random, spared: int, within_s: float) -> None:
    """Kill, cut off and disconnect nodes, but leave so many alive."""
    for node in choose.sample(nodes.nodes, choose.randint(0, len(nodes.nodes) - spared)):
        harm = choose.choice(["kill", "point", "unplug", "disconnect"])
        if harm == "point":
            node.dies_at = choose.randint(1, 40)
        else:
            what = {"kill": node.kill, "unplug": node.unplug, "disconnect": node.drop_connections}[harm]
            nodes.at(choose.uniform(0, within_s), what)


@pytest.mark.parametrize("disturbance", ["table", "outage", "connections", "nodes", "all"])
@pytest.mark.parametrize("seed", range(6))
def test_no_join_is_lost_and_nothing_is_written_twice(cluster, disturbance, seed):
    choose = random.Random(f"{disturbance} {seed}")
    away = outage(choose.uniform(0, 3))

    def fault(*what) -> Fault | None:
        spoilt = away(*what) if disturbance in ("outage", "all") else None
        return spoilt or (unreliable(*what) if disturbance in ("table", "all") else None)

    nodes = cluster(seed=seed, fault=fault)
    count = choose.randint(2, 30)
    minimum = choose.randint(1, count)
    for number in range(count):
        arrives_at, imports_s = choose.uniform(0, choose.choice([0, 1, 6])), choose.choice([-1, 0, 0.5, 2])
        nodes.add(f"node-{number:02d}", Limits(minimum, count), arrives_at, imports_s)
    if disturbance in ("nodes", "all"):
        disturb(nodes, choose, minimum, 8.0)
    if disturbance in ("connections", "all"):
        for _ in range(10):
            nodes.at(choose.uniform(0, 10), choose.choice(nodes.nodes).drop_connections)
    nodes.pass_time(10.0)
    nodes.settle(TIMEOUT_S)
    nodes.verify()


@pytest.mark.parametrize("victim", [0, 1, 4])
def test_a_node_may_die_at_each_of_its_points(cluster, victim):
    """Those are before and after each call of the table, each dialling and each wait, of the sealer above all."""
    for point in range(1, 80):
        nodes = cluster()
        for number in range(5):
            nodes.add(f"node-{number}", Limits(2, 5), 0.004 * (number * 3 % 5))
        nodes.nodes[victim].dies_at = point
        nodes.pass_time(4.0)
        nodes.settle(TIMEOUT_S)
        nodes.verify()
        if not nodes.nodes[victim].dead:
            break
    assert point > 15


@pytest.mark.parametrize("pause_s", [0.5, 2.0])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_node_that_died_at_any_of_its_points_returns_under_its_name(cluster, victim, pause_s):
    """The round needs it: members that wait for its dead process must not take the new one for it."""
    for point in range(1, 80):
        nodes = cluster()
        for number in range(3):
            nodes.add(f"node-{number}", Limits(3, 3), 0.004 * number)
        dying = nodes.nodes[victim]
        dying.dies_at = point
        nodes.at(4.0, nodes.check)
        nodes.run(lambda nodes=nodes, dying=dying: dying.dead or nodes.scheduler.now >= 4.0, 5.0)
        if not dying.dead:
            break
        nodes.add(dying.name, Limits(3, 3), nodes.scheduler.now + pause_s)
        assert nodes.settle(30.0, 3) < 15.0, f"died at point {point}"
        nodes.verify()
    assert point > 15


def test_a_sealer_that_hangs_is_passed_over_and_made_room_for_when_it_goes_on(cluster):
    """Its process lives and its hub answers, but its own calls of the table do not come back."""

    def fault(_: random.Random, now: float, __: str, node: Node) -> Fault | None:
        return Fault(done=False, seconds=30.0) if node.name == "node-0" and 0.065 < now < 30.0 else None

    nodes = cluster(fault=fault)
    for number in range(4):
        nodes.add(f"node-{number}", Limits(3, 4), 0.0)
    assert nodes.settle(TIMEOUT_S) <= 35.0
    nodes.verify()
    sealed = [write for write in nodes.storage.writes if write.key == ROUND_KEY and write.value["state"] == "sealed"]
    members = [[member["node"] for member in write.value["members"]] for write in sealed]
    assert members == [["node-1", "node-2", "node-3"], ["node-1", "node-2", "node-3", "node-0"]]
    assert sealed[0].node == "node-1"
    assert sealed[0].when <= 0.2 + RendezvousTimings().takeover_delay.total_seconds()


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_clock_that_jumps_by_an_hour_loses_nobody(cluster, hours, who):
    """Not even the monotonic clock, which no jump of the wall clock moves; the rendezvous reads no other one."""
    nodes = cluster()
    for number in range(4):
        nodes.add(f"node-{number}", Limits(2, 4))
    nodes.settle(TIMEOUT_S)
    rounds = len(nodes.rounds())
    jumping = next(node for node in nodes.nodes if node.rendezvous.machine.leads is (who == "leader"))
    jumping.clock_offset += 3600.0 * hours
    nodes.pass_time(30.0)
    end = nodes.scheduler.now
    assert len(nodes.rounds()) == rounds
    lost = next(node for node in nodes.nodes if node is not jumping)
    nodes.at(end + 0.1, lost.kill)
    nodes.run(lambda: lost.dead, 1.0)
    assert nodes.settle(TIMEOUT_S) - end < 15.0
    nodes.verify()


# --- the simulation itself -------------------------------------------------------------------------------------------


def history(nodes: Cluster, *rounds: Round) -> Cluster:
    nodes.storage.writes = [Write(0.0, "node", ROUND_KEY, round_.to_value(), done=True) for round_ in rounds]
    return nodes


def test_what_must_not_happen_is_noticed(cluster):
    nodes = cluster()
    nodes.add("node", Limits(1, 1))
    nodes.settle(TIMEOUT_S)
    (sealed,) = nodes.rounds()
    nodes.verify()
    with pytest.raises(AssertionError, match="sealed twice"):
        history(nodes, sealed, sealed).verify()
    with pytest.raises(AssertionError, match="a member twice"):
        history(nodes, replace(sealed, members=sealed.members * 2)).verify()
    with pytest.raises(AssertionError, match="not open"):
        history(nodes, sealed, replace(sealed, number=2)).verify()
    with pytest.raises(AssertionError, match="followed by 3"):
        history(nodes, sealed, Round(3)).verify()
    nodes.storage.writes = [Write(0.0, "node", member_key("node"), {"round": 1, "written_by": n}, True) for n in "ab"]
    with pytest.raises(AssertionError, match="the same twice"):
        nodes.verify()
