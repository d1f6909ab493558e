"""Rows that go back in time or are gone in the middle of a run, in simulated time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.round import Limits, Round
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY, RUN_KEY
from azureml_elastic.node.table import Row
from tests.support.rendezvous.simulation import Cluster, Node

TIMEOUT_S = 120.0
COUNT = 4
CALLS_PER_NODE = 12
CALLS_PER_NODE_AND_SECOND = 2
HEARTBEAT_S = RendezvousTimings().table_heartbeat_interval.total_seconds()

Rows = dict[str, Row]


def round_gone(rows: Rows, _: Rows) -> None:
    del rows[ROUND_KEY]


def round_older(rows: Rows, old: Rows) -> None:
    rows[ROUND_KEY] = old[ROUND_KEY]


def all_gone(rows: Rows, _: Rows) -> None:
    rows.clear()


def all_older(rows: Rows, old: Rows) -> None:
    rows.clear()
    rows.update(old)


HARMS = [round_gone, round_older, all_gone, all_older]


def leader(nodes: Cluster) -> Node:
    return next(node for node in nodes.nodes if node.in_round and node.rendezvous.machine.leads)


def rounds_pass(nodes: Cluster, count: int = 3) -> Rows:
    """Form some rounds, and return the rows as they were in the first one."""
    nodes.settle(TIMEOUT_S)
    old = dict(nodes.storage._rows)
    for _ in range(count):
        leader(nodes).break_round()
        nodes.pass_time(1.0)
        nodes.settle(TIMEOUT_S)
    return old


def harm(nodes: Cluster, how: Callable[[Rows, Rows], None], old: Rows) -> None:
    """Change the rows as the service might, without the nodes' knowledge."""
    how(nodes.storage._rows, old)


def heal(nodes: Cluster, number: int, size: int) -> float:
    """Run until all living nodes are in one round after this one, and return the seconds.

    Raises:
        AssertionError: that takes more calls of the table than are allowed.
    """
    began, calls = nodes.scheduler.now, nodes.storage.calls.total()

    def together() -> bool:
        alive = [node for node in nodes.nodes if not node.dead]
        numbers = {node.joined[-1].number if node.in_round else 0 for node in alive}
        return len(numbers) == 1 and numbers.pop() > number and len(alive[0].joined[-1].members) == len(alive) == size

    nodes.run(together, TIMEOUT_S)
    seconds = nodes.scheduler.now - began
    per_node = (nodes.storage.calls.total() - calls) / size
    assert per_node <= CALLS_PER_NODE + CALLS_PER_NODE_AND_SECOND * seconds, f"{per_node:.0f} calls in {seconds:.1f} s"
    assert not nodes.failures, nodes.failures
    assert Round.from_value(nodes.storage._rows[ROUND_KEY].value) == leader(nodes).joined[-1]
    assert RUN_KEY in nodes.storage._rows
    return seconds


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_survivors_of_a_lost_node_go_on_with_a_higher_round(cluster, how, victim):
    nodes = cluster(COUNT, 2, COUNT + 2)
    old = rounds_pass(nodes)
    lost = leader(nodes) if victim == "leader" else next(node for node in nodes.nodes if node is not leader(nodes))
    number = lost.joined[-1].number
    harm(nodes, how, old)
    lost.kill()
    assert heal(nodes, number, COUNT - 1) < 10.0


def test_the_key_of_the_run_comes_back_with_the_next_heartbeat(cluster):
    nodes = cluster(COUNT, 2, COUNT + 2)
    rounds_pass(nodes)
    number = leader(nodes).joined[-1].number
    key = nodes.storage._rows[RUN_KEY].value
    harm(nodes, all_gone, {})
    heal(nodes, number, COUNT)
    assert nodes.storage._rows[RUN_KEY].value == key


@pytest.mark.parametrize("makes", ["a new node", "an old node"])
def test_all_nodes_end_up_with_the_tables_key(cluster, makes):
    """Only the key's row is gone; whichever node writes it first decides."""
    nodes = cluster(COUNT, 1, COUNT + 2)
    rounds_pass(nodes)
    number = leader(nodes).joined[-1].number
    key = nodes.storage._rows.pop(RUN_KEY).value
    if makes == "an old node":
        leader(nodes).break_round()
        nodes.pass_time(2.0)
    nodes.add("node-9", Limits(1, COUNT + 2), nodes.scheduler.now)
    assert heal(nodes, number, COUNT + 1) < 3 * HEARTBEAT_S
    assert (nodes.storage._rows[RUN_KEY].value == key) == (makes == "an old node")
    leader(nodes).kill()
    heal(nodes, number + 1, COUNT)
    keys = {node.rendezvous._context.authenticator.key.hex() for node in nodes.nodes if not node.dead}
    assert keys == {nodes.storage._rows[RUN_KEY].value["key"]}
