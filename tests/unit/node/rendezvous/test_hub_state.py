"""The state of a hub, meeting points and read schedules: which node seals, where nodes meet, which spares count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from azureml_elastic.node.core.joining import MeetingPoints, ReadSchedule, is_landmark
from azureml_elastic.node.core.round import Limits, Member, Round
from azureml_elastic.node.core.sealing import drop_unresponsive
from azureml_elastic.node.rendezvous.hub.state import HubState, SealQueue
from azureml_elastic.node.rendezvous.hub.watchers import Watcher, Watchers


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """The part of a connection that the state uses."""

    def __init__(self):
        self.state = {}


def candidate(node: str, number: int = 1, **fields) -> Member:
    return Member(node, f"i-{node}", round=number, host=node, hub_port=1, **fields)


def watch(state: HubState, member: Member) -> Peer:
    peer = Peer()
    state.watch(member.node, Watcher(peer, 0.0, candidacy=member))
    return peer


def known(rows: Iterable[Member]) -> dict[str, Member]:
    return {row.node: row for row in rows}


def starting(node: str) -> Member:
    return replace(candidate(node), state="starting", round=0)


# --- seal queue ------------------------------------------------------------------------------------------------------


def test_the_queue_is_the_first_two_and_the_first_two_without_strikes():
    queue = SealQueue(Round(2, previous=("p",)))
    queue.add([candidate(node, 2) for node in "dcb"] + [candidate("a", 1)])
    assert [member.node for member in queue.first] == ["b", "c"]
    queue.add([candidate("p", 2, strikes=1), candidate("0", 2, strikes=3)])
    assert [member.node for member in queue.first] == ["p", "0", "b", "c"]
    assert not queue.remove("d")
    assert queue.remove("b")


def test_the_first_position_is_sent_each_time_and_the_second_once():
    state = HubState(Clock())
    state.add_own(Round(), candidate("m"))
    assert state.take_positions() == []  # its own node is sent nothing, but calls should_seal()
    assert state.should_seal()
    z = watch(state, candidate("z"))
    assert state.take_positions() == [(z, 1)]
    b = watch(state, candidate("b"))
    assert state.take_positions() == [(b, 0)]
    watch(state, candidate("y"))
    assert state.take_positions() == [(b, 0)]
    watch(state, candidate("a"))
    assert not state.should_seal()
    assert state.leave("a", state.watchers.nodes.get("a").connection)
    assert state.should_seal()
    assert state.leave("b", b)
    assert state.take_positions() == [(state.watchers.nodes.get("y").connection, 1)]
    assert not state.leave("z", z)


def test_a_node_that_still_imports_lets_others_meet_at_its_hub():
    state = HubState(Clock())
    c, b = watch(state, candidate("c")), watch(state, candidate("b"))
    assert state.take_positions() == [(b, 0), (c, 1)]


def test_a_hub_follows_the_row_and_finds_nodes_that_have_missed_a_version():
    state = HubState(Clock())
    assert state.newer_than(Round()) is None
    sealed, reopened = Round(1, "sealed"), Round(2, previous=("z",))
    assert state.publish(sealed)
    assert not state.publish(Round())
    assert state.newer_than(Round()) == sealed
    # A candidate may know the next round before this hub does.
    a, z = watch(state, candidate("a", 2)), watch(state, candidate("z", 2))
    assert state.take_positions() == [(a, 0), (z, 1)]
    assert state.publish(reopened)
    assert state.take_positions() == [(z, 0), (a, 1)]
    assert not state.is_first_sign_of(sealed)
    assert state.is_first_sign_of(replace(reopened, state="sealed"))
    assert not state.is_first_sign_of(replace(reopened, state="sealed"))


# --- points ----------------------------------------------------------------------------------------------------------


def test_all_nodes_meet_at_the_first_by_name_in_the_first_round():
    rows = [starting("a"), candidate("c"), candidate("d"), Member("0", "i-0", state="left", hub_port=1)]
    for me in "bcd":
        points = MeetingPoints(Round(), candidate(me), {row.node: row.to_value() for row in rows})
        assert points.choose().node == "a"
        assert not points.is_first
    first = MeetingPoints(Round(), candidate("a"), known(rows))
    assert first.is_first
    assert first.choose().node == "c"  # nodes that met before it came must learn of it
    assert MeetingPoints(Round(), candidate("c"), known([candidate("c")])).choose() is None


def test_all_nodes_meet_at_a_landmark_if_there_is_one():
    assert is_landmark("f")
    rows = [candidate(node) for node in "acfg"]
    for me in "bz":
        assert MeetingPoints(Round(), candidate(me), known(rows)).choose().node == "f"
    point = MeetingPoints(Round(), candidate("f"), known(rows))
    assert point.is_first
    assert point.choose().node == "a"


def test_all_nodes_meet_at_the_first_survivor_later():
    round_ = Round(2, previous=("c", "b"))
    old = [candidate(node) for node in "abcd"]
    for me in "abd":
        points = MeetingPoints(round_, candidate(me, 2), known(old))
        assert points.choose().node == "c"
        assert not points.is_first
    first = MeetingPoints(round_, candidate("c", 2), known(old))
    assert first.is_first
    assert first.choose() is None


def test_a_meeting_point_that_is_gone_is_not_chosen_again():
    points = MeetingPoints(Round(), candidate("d"), known([candidate(node) for node in "abc"]))
    points.connect_failed(points.choose(), refused=True)
    assert points.choose().node == "b"
    assert points.is_gone(candidate("a"))
    for given_up in (False, False, True):
        assert points.choose().node == "b"
        assert points.connection_broke(points.choose(), answered=True) == given_up
    assert points.choose().node == "c"
    assert not points.is_gone(candidate("b"))
    points.connection_broke(points.choose(), answered=False)  # the port belongs to another process now
    assert points.is_gone(candidate("c"))
    assert points.choose() is None
    assert points.is_first


def test_no_more_than_two_machines_that_do_not_answer_are_dialled():
    points = MeetingPoints(Round(), candidate("x"), known([candidate(node) for node in "abcdyz"]))
    for node in "ab":
        assert points.choose().node == node
        points.connect_failed(points.choose(), refused=False)
    assert points.choose() is None
    first = MeetingPoints(Round(), candidate("a"), known([candidate(node) for node in "yz"]))
    first.connect_failed(first.choose(), refused=False)
    assert first.choose() is None


def test_a_node_that_cannot_be_reached_is_waited_for_only_if_it_is_there():
    points = MeetingPoints(Round(2, previous=("a", "b")), candidate("b", 2), known([candidate("a")]))
    points.connect_failed(points.choose(), refused=False)
    assert points.is_gone(candidate("a", 1))
    assert not points.is_gone(candidate("a", 2))


@pytest.mark.parametrize(("me", "minimum", "left"), [("a", 1, "abc"), ("b", 2, "bc"), ("b", 3, "abc"), ("c", 1, "c")])
def test_candidates_that_missed_their_turn_are_dropped_if_the_minimum_allows(me, minimum, left):
    rows = [candidate(node) for node in "abc"]
    kept = drop_unresponsive(Round(), rows, me, Limits(minimum, 5))
    assert "".join(member.node for member in kept) == left


# --- the schedule ----------------------------------------------------------------------------------------------------


def test_an_active_node_reads_at_once_and_then_less_and_less_often():
    schedule = ReadSchedule(0.0)
    assert not schedule.should_read(5.0)
    schedule.set_active(True, 5.0)
    assert schedule.should_read(5.0)
    pauses = []
    now = 5.0
    for _ in range(12):
        schedule.has_read(now, float("inf"))
        pauses.append(schedule._read_at - now)
        now = schedule._read_at
    assert pauses[0] == pytest.approx(0.1)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(2.0)
    schedule.candidate_came()
    assert schedule._read_at <= now


def test_a_node_that_receives_changes_reads_seldom_but_in_time_for_its_turn():
    schedule = ReadSchedule(0.0)
    schedule.set_active(False, 0.0)
    assert schedule.seconds_left(0.0) == pytest.approx(10.0)
    schedule.has_read(10.0, float("inf"))
    assert schedule.seconds_left(10.0) == pytest.approx(10.0)
    schedule.has_read(20.0, 3.0)
    assert schedule.seconds_left(20.0) == pytest.approx(3.0)


def test_many_messages_lead_to_one_decision():
    schedule = ReadSchedule(0.0)
    schedule.set_active(True, 0.0)
    schedule.has_read(0.0, float("inf"))
    assert schedule.take_decision(0.0)
    for now in (0.001, 0.01):
        schedule.hub_received()
        assert not schedule.take_decision(now)
        assert 0 < schedule.seconds_left(now) <= 0.02
    assert schedule.take_decision(0.021)
    assert not schedule.take_decision(0.05)


# --- spares ----------------------------------------------------------------------------------------------------------


class Spares:
    """Watchers of rank 0's hub over several rounds."""

    def __init__(self):
        self.clock = Clock()
        self.watchers = Watchers(self.clock)

    def says(self, node: str, beside: int) -> None:
        before = self.watchers.nodes.get(node)
        peer = before.connection if before else Peer()
        self.watchers.add(node, Watcher(peer, self.clock.now, beside=beside))

    def seal(self, number: int, members: str, expected: str) -> None:
        self.watchers.enter(
            Round(number, "sealed", tuple(candidate(m, number) for m in members), expected=(*expected,))
        )

    def waiting(self, members: str = "") -> str:
        return "".join(sorted(self.watchers.waiting(members)))


def test_room_is_made_for_nodes_that_wait_beside_the_round():
    spares = Spares()
    spares.seal(1, "a", "")
    spares.says("x", 1)
    spares.says("a", 1)
    assert spares.waiting("a") == "x"


def test_no_room_is_made_for_a_quarantined_host():
    watchers = Watchers(Clock())
    watchers.enter(Round(1, "sealed", (candidate("a"),)))
    for node, strikes in (("x", 1), ("y", 2)):
        watchers.add(node, Watcher(Peer(), 0.0, beside=1, strikes=strikes))
    assert list(watchers.waiting("a", 2)) == ["x"]
    assert list(watchers.waiting("a")) == ["x", "y"]


def test_a_node_that_missed_the_seal_counts_again_once_it_waits_beside_that_round():
    spares = Spares()
    spares.seal(1, "a", "")
    spares.says("x", 1)
    spares.seal(2, "a", "ax")
    spares.clock.now += 1000
    assert spares.waiting("a") == ""  # a connection may be all that is left of it
    spares.says("x", 2)
    assert spares.waiting("a") == "x"


def test_a_node_that_never_joins_waits_longer_each_time_until_it_has_joined():
    spares = Spares()
    spares.seal(1, "a", "")
    waits = []
    for number in range(2, 10):
        spares.seal(number, "a", "ax")
        spares.says("x", number)
        said = spares.clock.now
        while not spares.waiting("a"):
            spares.clock.now += 1
            spares.says("x", number)  # saying it again does not begin the wait anew
        waits.append(spares.clock.now - said)
    assert waits == [0, 15, 30, 60, 120, 240, 240, 240]
    spares.seal(10, "ax", "ax")
    spares.seal(11, "a", "a")
    spares.says("x", 11)
    assert spares.waiting("a") == "x"
