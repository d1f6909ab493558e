"""In which order a node takes in what has happened, and what it does not take in meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from azureml_elastic.config import ElasticResources, Plan, RendezvousTimings
from azureml_elastic.ipc.agent_messages import Leaving
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.hub_state import HubView
from azureml_elastic.node.core.node import Node, Part
from azureml_elastic.node.core.round import Limits, Member, NewestRound, Round
from azureml_elastic.node.driver import Driver, Received

ME = Member("b", "i-b", host="h", hub_port=1)
ROUND = Round(1, "sealed", members=(Member("a", "i-a", host="g", hub_port=1), replace(ME, store_port=1)))


class World:
    """A port with fixed answers, which records what is done and what the round's machine takes in."""

    def __init__(self):
        self.newest = NewestRound()
        self.now, self.performed, self.received = 0.0, [], Received()
        self.seen, self.ready = ev.WorkersSeen(), True
        self.answers = {
            do.ReadRound: ev.RoundRead(Round(1, "open")),
            do.FindRound: ev.Started(Round(1, "open"), {}),
            do.PrepareRow: ev.RowPrepared(replace(ME, round=1, store_port=1)),
            do.StartWorkers: ev.WorkersStarted(),
            do.Connect: ev.Connected(),
            do.ReadRows: ev.RowsRead(Round(1, "open"), {}),
            do.TakeCandidates: ev.CandidatesTaken([]),
            do.Reopen: ev.EndWritten(mine=True),
            do.Enter: ev.Entered(),
            do.ReachMembers: ev.MembersReached(),
            do.WriteRow: ev.RowWritten(),
        }

    def clock(self):
        return self.now

    def receive(self):
        received, self.received = self.received, Received()
        return received

    def must_leave(self):
        return False

    def view(self):
        return HubView()

    def woken(self):
        return ev.Woken()

    def marked(self, me):
        return me

    def readiness(self):
        return ev.ReadinessSeen(preloaded=True, ready=self.ready, settled=self.ready)

    def workers(self):
        return [], self.seen

    def own_events(self, training, workers):
        return []

    def perform(self, action):
        self.performed.append(action)
        return self.answers.get(type(action))

    def took(self, kind):
        return [action for action in self.performed if isinstance(action, kind)]


class Recorded(Node):
    """A node that records what its machine of the round takes in."""

    def handle(self, event, now):
        if self.training is not None:
            self.taken.append(event)
        return super().handle(event, now)


def node_in(world, plan=None):
    node = Recorded(ME, Limits(2, 2), RendezvousTimings(), world.newest)
    node.taken = []
    node.run_workers(plan or Plan(resources=ElasticResources(max_instance_count=2)), opens_session=True)
    return node, Driver(node, world)


def member(world, round_=ROUND):
    """Return a node in a round."""
    node, driver = node_in(world)
    driver.begin()
    driver.turn()
    world.newest.observe(round_)
    driver.turn(woken=True)
    assert node.part is Part.MEMBER
    assert [type(event) for event in node.taken] == [ev.RoundSeen, ev.WorkersSeen, ev.TimePassed]
    node.taken.clear()
    return node, driver


def test_a_node_is_led_from_its_workers_to_its_place():
    world = World()
    node, _ = member(world)
    kinds = [type(action) for action in world.performed]
    assert kinds[:4] == [do.ReadRound, do.RecordReady, do.LeaveRound, do.FindRound]
    assert kinds[-4:] == [do.Enter, do.ReachMembers, do.Take, do.StartWorkers]
    assert (node.round, node.rank, node.leads) == (ROUND, 1, False)


def test_a_newcomer_waits_for_its_imports_before_it_is_a_spare():
    world = World()
    world.answers[do.FindRound] = None
    node, driver = node_in(world)
    driver.begin()
    driver.turn()
    world.ready, world.performed = False, []
    driver.answer(ev.Started(replace(ROUND, members=ROUND.members[:1]), {}))
    driver.turn(woken=True)
    assert node.prepares
    assert world.performed == []
    world.ready = True
    driver.turn()
    assert not node.prepares
    assert world.performed[0] == do.ReadRound(), "the round may be another one by now"


def test_nothing_is_brought_while_a_call_is_under_way():
    world = World()
    world.answers[do.FindRound] = None
    node, driver = node_in(world)
    driver.begin()
    world.newest.observe(ROUND)
    driver.turn(woken=True)
    assert node.part is Part.FINDING
    assert driver.deadline == float("inf")
    driver.answer(ev.Started(Round(1, "open"), {}))
    assert node.part is Part.JOINING


def test_a_call_for_a_version_that_has_passed_is_not_made():
    world = World()
    node, driver = node_in(world)
    world.newest.observe(Round(1, "sealed", members=(replace(ME, node="a", incarnation="i-a"),)))
    driver.begin()
    driver.turn()
    assert not world.took(do.PrepareRow)
    assert node.joiner.round.state == "sealed"


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_what_workers_hold_is_kept_unless_the_run_has_ended_well(state):
    world = World()
    node, driver = member(world)
    world.newest.observe(Round(1, state))
    driver.turn(woken=True)
    assert node.part is Part.ENDED
    assert node.keeps_state == (state == "failed")


def test_messages_of_earlier_rounds_are_dropped_and_those_of_later_ones_stay():
    world = World()
    _, driver = member(world)
    world.received = Received(messages=[(n, ev.FromMember(f"of {n}", Leaving())) for n in (0, 2, 1, 1)])
    driver.status()
    assert driver.take_messages() == 2 * [ev.FromMember("of 1", Leaving())]
    assert driver.take_messages() == []


def test_who_leaves_and_who_is_lost_is_known_before_what_the_workers_have_done():
    world = World()
    node, driver = member(world)
    world.seen = ev.WorkersSeen(exit_codes={0: 1})
    world.received = Received(
        leader=[ev.HubSent(messages.Lost(("a",), ()))], messages=[(1, ev.FromMember("a", Leaving()))]
    )
    driver.turn(woken=True)
    kinds = [type(event) for event in node.taken]
    assert kinds[:2] == [ev.FromMember, ev.RoundSeen]
    assert node.taken[1].lost == {"a"}
    assert ev.WorkersSeen not in kinds or kinds.index(ev.WorkersSeen) > 1


def test_what_has_not_changed_is_not_brought_again():
    world = World()
    node, driver = member(world)
    driver.turn()
    assert [type(event) for event in node.taken] == [ev.TimePassed]


def test_the_row_is_looked_at_once_until_the_look_has_ended():
    world = World()
    node, driver = member(world)
    for _ in range(2):
        world.received = Received(must_look=True)
        driver.turn()
    assert world.took(do.LookAtRow) == [do.LookAtRow(ROUND)]
    world.received = Received(rows=[ev.RowSeen(ROUND, None)])  # the table was away
    driver.turn()
    assert len(world.took(do.LookAtRow)) == 2, "of the request meanwhile, and as there was no answer"
    world.received = Received(rows=[ev.RowSeen(replace(ROUND), True)])
    driver.turn()
    assert not node.seen.over, "a look at another round says nothing of this one"
    world.received = Received(must_look=True)
    driver.turn()
    world.received = Received(rows=[ev.RowSeen(ROUND, True)])
    driver.turn()
    assert node.seen.over
    assert node.part is Part.DEFERRING


# --- who ends a round ------------------------------------------------------------------------------------------------


def of_nodes(*names):
    members = (replace(ME, node=name, incarnation=f"i-{name}", host_id=f"host of {name}") for name in names)
    return Round(1, "sealed", members=tuple(replace(each, store_port=1) for each in members))


def lost(*names):
    return ev.HubSent(messages.Lost(names, ()))


@pytest.mark.parametrize("is_ended", [False, True])
@pytest.mark.parametrize(
    ("names", "happened", "seconds", "by"),
    [
        ("acbd", [lost("d")], 10.0, None),  # rank 0 knows of it, and this node is connected to it
        ("acbd", [ev.LinkEnded()], 0.05, "c"),
        ("acbd", [ev.LinkEnded(was_given_up=True)], 0.1, None),
    ],
)
def test_the_round_is_left_to_the_survivor_whose_turn_it_is(names, happened, seconds, by, is_ended):
    world = World()
    node, driver = member(world, of_nodes(*names))
    world.received = Received(leader=happened)
    driver.turn(woken=True)
    assert node.part is Part.DEFERRING
    assert driver.deadline == pytest.approx(seconds)
    assert [action.by.node for action in world.took(do.AwaitEnd)] == ([by] if by else [])
    assert not world.took(do.Reopen)
    if is_ended:
        world.newest.observe(Round(2))
    else:
        world.now = driver.deadline
    driver.turn(woken=True)
    assert bool(world.took(do.Reopen)) != is_ended
    assert node.part is Part.JOINING


def test_a_round_whose_rank_0_is_lost_before_it_has_ended_it_is_ended_without_both():
    world = World()
    _, driver = member(world, of_nodes(*"abcde"))
    world.received = Received(leader=[lost("c")])
    driver.turn(woken=True)
    world.received = Received(leader=[ev.LinkEnded()])
    driver.turn(woken=True)
    assert world.took(do.Reopen)[0].lost == {"a", "c"}
    assert world.took(do.Strike) == [do.Strike(f"host of {each}", "lost its connection") for each in "ac"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_node_that_cannot_enter_leaves_the_end_to_the_survivor_whose_turn_it_is(ends):
    world = World()
    world.answers[do.Enter] = ev.EntryFailed("refused", False, replace(ME, unreached=("i-a",)))
    world.answers[do.Reopen] = None
    node, driver = node_in(world)
    driver.begin()
    driver.turn()
    world.newest.observe(of_nodes(*"acb"))
    driver.turn(woken=True)
    assert node.part is Part.DEFERRING
    assert [action.by.node for action in world.took(do.AwaitEnd)] == ["c"]
    world.received = Received(watched=[ev.LinkEnded()])
    driver.turn(woken=True)
    if ends:
        world.newest.observe(Round(2))
    else:
        world.now = driver.deadline
        world.answers[do.Reopen] = ev.EndWritten(mine=True)
    driver.turn(woken=True)
    reopening = do.Reopen("refused", frozenset({"a"}), round_failed=True)
    assert world.took(do.Reopen) == ([] if ends else [reopening])
    assert node.part is Part.JOINING
