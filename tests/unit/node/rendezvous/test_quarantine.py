"""Nodes with strikes find each other through a real table and real sockets, each on a thread of its own."""

from __future__ import annotations

from datetime import timedelta

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import RunSucceeded
from azureml_elastic.node.core.actions import Close, Reopen
from azureml_elastic.node.failures.host_strikes import HostStrikes
from azureml_elastic.node.rendezvous.row_keys import member_key
from azureml_elastic.node.table.server_time import ServerClock
from tests.support.rendezvous.nodes import TIMEOUT, Leaving
from tests.support.waiting import until

TIMINGS = RendezvousTimings(
    heartbeat_interval=timedelta(seconds=0.5),
    heartbeat_timeout=timedelta(seconds=5),
    takeover_delay=timedelta(seconds=0.5),
    rejoin_timeout=timedelta(seconds=1),
    table_heartbeat_interval=timedelta(seconds=1),
)


class Agent(Leaving):
    """An agent with strikes against its host."""

    def __init__(self, noticed, strikes):
        super().__init__(noticed)
        self._strikes, self.asked = strikes, []

    def live_strikes(self, *, fresh):
        self.asked.append(fresh)
        return self._strikes(fresh)


def make(nodes, name, minimum, maximum, strikes=lambda _: 0):
    agent, host = Agent(nodes.over, strikes), f"host-of-{name}"
    nodes.timings = TIMINGS
    return nodes.make(name, minimum, maximum, surroundings=agent, host_id=host, quarantine=2)


def names(assignment):
    return [member.node for member in assignment.round.members]


def waits(nodes, name):
    row = nodes.table.get(member_key(name))
    return row is not None and row.value["state"] == "waiting"


def test_a_quarantined_node_is_taken_where_the_minimum_needs_it_and_never_leads(nodes):
    excluded = nodes.start(make(nodes, "a-excluded", 2, 3, lambda _: 3))[0]
    until(lambda: waits(nodes, "a-excluded"))
    well = nodes.start(make(nodes, "well", 2, 3))[0]
    assert names(well.result(TIMEOUT)) == names(excluded.result(TIMEOUT)) == ["well", "a-excluded"]
    member = well.result().round.members[1]
    assert (member.host_id, member.strikes) == ("host-of-a-excluded", 3)


def test_a_quarantined_node_makes_room_for_a_node_that_is_well(nodes):
    first, second = make(nodes, "first", 2, 3), make(nodes, "second", 2, 3)
    excluded = make(nodes, "a-excluded", 2, 3, lambda _: 2)
    waiting = nodes.start(excluded)[0]
    until(lambda: waits(nodes, "a-excluded"))
    assignment = nodes.join(first)[0]
    assert names(assignment) == names(waiting.result(TIMEOUT)) == ["first", "a-excluded"]
    coming = nodes.start(second)[0]
    until(lambda: first.hub.view().waiting == {"second"})
    assert first.round_end.write(Reopen("joining: second"))
    assignments = [*nodes.start(first), coming]
    outside = nodes.start(excluded)[0]
    assert [names(future.result(TIMEOUT)) for future in assignments] == [["first", "second"]] * 2
    assert first.round_end.write(Close(succeeded=True))
    with pytest.raises(RunSucceeded):
        outside.result(TIMEOUT)


def test_a_node_that_was_lost_reads_what_was_held_against_it(nodes):
    """Through the real strikes: the survivor strikes, the lost one comes back with the strike in its row."""
    made = []

    def strikes(name):
        made.append(HostStrikes(nodes.table, f"host-of-{name}", name, ServerClock(nodes.table, name)))
        return made[-1]

    here, there = strikes("here"), strikes("there")
    survivor = make(nodes, "here", 1, 2, lambda fresh: here.mine(fresh=fresh))
    lost = make(nodes, "there", 1, 2, lambda fresh: there.mine(fresh=fresh))
    survivor.announce()
    lost.announce()
    both = nodes.start(survivor, lost)
    assert [names(future.result(TIMEOUT)) for future in both] == [["here", "there"]] * 2
    here.strike("host-of-there", "went silent", "round.000001")
    until(lambda: here.live("host-of-there") == 1)
    assert there.mine() == 0, "it has not read the strike yet"
    until(lambda: list(nodes.table.query("strike.")))
    assert survivor.round_end.write(Reopen("lost there", lost=frozenset({"there"})))
    alone = nodes.join(survivor)[0]
    assert names(alone) == ["here"]
    back = nodes.start(lost)[0]
    until(lambda: survivor.hub.view().waiting == {"there"})
    assert survivor.round_end.write(Reopen("joining: there"))
    again = nodes.start(survivor)[0]
    assert names(again.result(TIMEOUT)) == names(back.result(TIMEOUT)) == ["here", "there"]
    assert [member.strikes for member in again.result().round.members] == [0, 1]
    assert [node._surroundings.asked for node in (survivor, lost)] == [[False, False, False], [False, True]]
    for one in made:
        one.close()
