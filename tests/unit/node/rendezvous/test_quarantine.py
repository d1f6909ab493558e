"""Nodes with strikes find each other through a real table and real sockets, each on a thread of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import RunSucceeded
from azureml_elastic.node.core.actions import Close, Reopen
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.failures.host_strikes import HostStrikes
from azureml_elastic.node.rendezvous.context import LocalNode, Surroundings
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.row_keys import member_key
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.server_time import ServerClock
from tests.support.waiting import until

TIMINGS = RendezvousTimings(
    heartbeat_interval=timedelta(seconds=0.5),
    heartbeat_timeout=timedelta(seconds=5),
    takeover_delay=timedelta(seconds=0.5),
    rejoin_timeout=timedelta(seconds=1),
    table_heartbeat_interval=timedelta(seconds=1),
)
TIMEOUT = 60


class Cluster:
    def __init__(self, path):
        self.table = open_table(TableRendezvous(endpoint=str(path)), "run", NodeEnvironment.read({}))
        self.pool = ThreadPoolExecutor(8)
        self.over = threading.Event()
        self.made = []
        self.asked: dict[str, list[bool]] = {}

    def node(self, name, limits, strikes=None):
        self.asked[name] = []

        cluster = self

        class Agent(Surroundings):
            def must_leave(self):
                return cluster.over.is_set()

            def live_strikes(self, *, fresh):
                cluster.asked[name].append(fresh)
                return strikes(fresh) if strikes else 0

        here = LocalNode(name, "127.0.0.1", host_id=f"host-of-{name}")
        node = Rendezvous(self.table, here, limits, TIMINGS, Agent())
        self.made.append(node)
        return node

    def join(self, node):
        return self.pool.submit(node.join)

    def close(self):
        self.over.set()
        for node in self.made:
            node.queue.wake()
        self.pool.shutdown(wait=True)
        for node in self.made:
            node.shutdown()
        self.table.close()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path / "table.sqlite")
    yield made
    made.close()


def names(assignment):
    return [member.node for member in assignment.round.members]


def waits(cluster, name):
    row = cluster.table.get(member_key(name))
    return row is not None and row.value["state"] == "waiting"


def test_a_quarantined_node_stays_outside_while_the_minimum_is_present_and_receives_the_end(cluster):
    limits = Limits(1, 2, 2)
    well = cluster.node("well", limits)
    well.announce()  # the node that comes first waits for it
    excluded = cluster.join(cluster.node("a-excluded", limits, lambda _: 2))
    until(lambda: waits(cluster, "a-excluded"))
    assignment = cluster.join(well).result(TIMEOUT)
    assert names(assignment) == ["well"]
    assert not excluded.done()
    until(lambda: well.hub._state.watchers.nodes.get("a-excluded") is not None)
    assert well.status().waiting == frozenset(), "no room is made for it"
    assert well.round_end.close(Close(succeeded=True))
    with pytest.raises(RunSucceeded):
        excluded.result(TIMEOUT)


def test_a_quarantined_node_is_taken_where_the_minimum_needs_it_and_never_leads(cluster):
    limits = Limits(2, 3, 2)
    excluded = cluster.join(cluster.node("a-excluded", limits, lambda _: 3))
    until(lambda: waits(cluster, "a-excluded"))
    well = cluster.join(cluster.node("well", limits))
    assert names(well.result(TIMEOUT)) == names(excluded.result(TIMEOUT)) == ["well", "a-excluded"]
    member = well.result().round.members[1]
    assert (member.host_id, member.strikes) == ("host-of-a-excluded", 3)


def test_a_quarantined_node_makes_room_for_a_node_that_is_well(cluster):
    limits = Limits(2, 3, 2)
    first, second = cluster.node("first", limits), cluster.node("second", limits)
    excluded = cluster.node("a-excluded", limits, lambda _: 2)
    waiting = cluster.join(excluded)
    until(lambda: waits(cluster, "a-excluded"))
    assignment = cluster.join(first).result(TIMEOUT)
    assert names(assignment) == names(waiting.result(TIMEOUT)) == ["first", "a-excluded"]
    coming = cluster.join(second)
    until(lambda: first.hub.view().waiting == {"second"})
    assert first.round_end.reopen(Reopen("joining: second"))
    assignments = [cluster.join(first), coming]
    outside = cluster.join(excluded)
    assert [names(future.result(TIMEOUT)) for future in assignments] == [["first", "second"]] * 2
    assert first.round_end.close(Close(succeeded=True))
    with pytest.raises(RunSucceeded):
        outside.result(TIMEOUT)


def test_a_node_that_was_lost_reads_what_was_held_against_it(cluster):
    """Through the real strikes: the survivor strikes, the lost one comes back with the strike in its row."""
    limits = Limits(1, 2, 2)
    made = []

    def strikes(name):
        made.append(HostStrikes(cluster.table, f"host-of-{name}", name, ServerClock(cluster.table, name)))
        return made[-1]

    here, there = strikes("here"), strikes("there")
    survivor = cluster.node("here", limits, lambda fresh: here.mine(fresh=fresh))
    lost = cluster.node("there", limits, lambda fresh: there.mine(fresh=fresh))
    survivor.announce()
    lost.announce()
    both = [cluster.join(survivor), cluster.join(lost)]
    assert [names(future.result(TIMEOUT)) for future in both] == [["here", "there"]] * 2
    here.strike("host-of-there", "went silent", "round.000001")
    until(lambda: here.live("host-of-there") == 1)
    assert there.mine() == 0, "it has not read the strike yet"
    until(lambda: list(cluster.table.query("strike.")))
    assert survivor.round_end.reopen(Reopen("lost there", lost=frozenset({"there"})))
    alone = cluster.join(survivor).result(TIMEOUT)
    assert names(alone) == ["here"]
    back = cluster.join(lost)
    until(lambda: survivor.hub.view().waiting == {"there"})
    assert survivor.round_end.reopen(Reopen("joining: there"))
    again = cluster.join(survivor)
    assert names(again.result(TIMEOUT)) == names(back.result(TIMEOUT)) == ["here", "there"]
    assert [member.strikes for member in again.result().round.members] == [0, 1]
    assert cluster.asked == {"here": [False, False, False], "there": [False, True]}
    for one in made:
        one.close()
