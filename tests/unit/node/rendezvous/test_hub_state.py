"""Who is asked to look after an open round, where nodes meet for it, and for whom a running one makes room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from azureml_elastic.node.rendezvous.hub.state import HubState, Line
from azureml_elastic.node.rendezvous.hub.watchers import Watcher, Watchers
from azureml_elastic.node.rendezvous.join.meeting_point import MeetingPoints, ReadSchedule, in_time
from azureml_elastic.node.rendezvous.state.round import Limits, Member, Round
from azureml_elastic.node.rendezvous.state.row_keys import is_landmark


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """As much of a connection as a reception looks at."""

    def __init__(self):
        self.state = {}


def candidate(node: str, number: int = 1, **fields) -> Member:
    return Member(node, f"i-{node}", round=number, host=node, hub_port=1, **fields)


def watch(reception: HubState, member: Member) -> Peer:
    peer = Peer()
    reception.watch(member.node, Watcher(peer, 0.0, candidacy=member))
    return peer


def starting(node: str) -> Member:
    return replace(candidate(node), state="starting", round=0)


# --- the line --------------------------------------------------------------------------------------------------------


def test_the_first_two_are_asked_and_the_first_two_without_strikes():
    line = Line(Round(2, previous=("p",)))
    line.add([candidate(node, 2) for node in "dcb"] + [candidate("a", 1)])
    assert [member.node for member in line.first] == ["b", "c"]
    line.add([candidate("p", 2, strikes=1), candidate("0", 2, strikes=3)])
    assert [member.node for member in line.first] == ["p", "0", "b", "c"]
    assert not line.remove("d")
    assert line.remove("b")


def test_a_hub_calls_the_first_of_its_watchers_each_time_and_the_second_once():
    reception = HubState(Clock())
    reception.stand(Round(), candidate("m"))
    assert reception.calls() == []  # its own node is not told, but asks
    assert reception.should_seal()
    z = watch(reception, candidate("z"))
    assert reception.calls() == [(z, 1)]
    b = watch(reception, candidate("b"))
    assert reception.calls() == [(b, 0)]
    watch(reception, candidate("y"))
    assert reception.calls() == [(b, 0)]
    watch(reception, candidate("a"))
    assert not reception.should_seal()
    assert reception.leave("a", reception.watchers.get("a").connection)
    assert reception.should_seal()
    assert reception.leave("b", b)
    assert reception.calls() == [(reception.watchers.get("y").connection, 1)]
    assert not reception.leave("z", z)


def test_a_node_that_still_imports_lets_others_meet_at_its_hub():
    reception = HubState(Clock())
    c, b = watch(reception, candidate("c")), watch(reception, candidate("b"))
    assert reception.calls() == [(b, 0), (c, 1)]


def test_a_hub_follows_the_row_and_knows_who_is_behind():
    reception = HubState(Clock())
    assert reception.missed(Round()) is None
    sealed, reopened = Round(1, "sealed"), Round(2, previous=("z",))
    assert reception.learn(sealed)
    assert not reception.learn(Round())
    assert reception.missed(Round()) == sealed
    # A candidate may have heard of the next round before this hub has.
    a, z = watch(reception, candidate("a", 2)), watch(reception, candidate("z", 2))
    assert reception.calls() == [(a, 0), (z, 1)]
    assert reception.learn(reopened)
    assert reception.calls() == [(z, 0), (a, 1)]
    assert not reception.hint(sealed)
    assert reception.hint(replace(reopened, state="sealed"))
    assert not reception.hint(replace(reopened, state="sealed"))


# --- desks -----------------------------------------------------------------------------------------------------------


def test_everybody_meets_at_the_first_by_name_in_the_first_round():
    rows = [starting("a"), candidate("c"), candidate("d"), Member("0", "i-0", state="left", hub_port=1)]
    for me in "bcd":
        desks = MeetingPoints(Round(), candidate(me), {row.node: row.to_value() for row in rows})
        assert desks.choose().node == "a"
        assert not desks.first
    first = MeetingPoints(Round(), candidate("a"), rows)
    assert first.first
    assert first.choose().node == "c"  # those that met before it came must learn of it
    assert MeetingPoints(Round(), candidate("c"), [candidate("c")]).choose() is None


def test_everybody_meets_at_a_landmark_if_there_is_one():
    assert is_landmark("f")
    rows = [candidate(node) for node in "acfg"]
    for me in "bz":
        assert MeetingPoints(Round(), candidate(me), rows).choose().node == "f"
    desk = MeetingPoints(Round(), candidate("f"), rows)
    assert desk.first
    assert desk.choose().node == "a"


def test_everybody_meets_at_the_first_survivor_later():
    round_ = Round(2, previous=("c", "b"))
    old = [candidate(node) for node in "abcd"]
    for me in "abd":
        desks = MeetingPoints(round_, candidate(me, 2), old)
        assert desks.choose().node == "c"
        assert not desks.first
    first = MeetingPoints(round_, candidate("c", 2), old)
    assert first.first
    assert first.choose() is None


def test_a_desk_that_is_gone_is_passed_over():
    desks = MeetingPoints(Round(), candidate("d"), [candidate(node) for node in "abc"])
    desks.unreachable(desks.choose(), refused=True)
    assert desks.choose().node == "b"
    assert desks.gone(candidate("a"))
    for given_up in (False, False, True):
        assert desks.choose().node == "b"
        assert desks.broke(desks.choose(), heard=True) == given_up
    assert desks.choose().node == "c"
    assert not desks.gone(candidate("b"))
    desks.broke(desks.choose(), heard=False)  # somebody else's port by now
    assert desks.gone(candidate("c"))
    assert desks.choose() is None
    assert desks.first


def test_machines_that_do_not_answer_are_not_all_dialled():
    desks = MeetingPoints(Round(), candidate("x"), [candidate(node) for node in "abcdyz"])
    for node in "ab":
        assert desks.choose().node == node
        desks.unreachable(desks.choose(), refused=False)
    assert desks.choose() is None
    first = MeetingPoints(Round(), candidate("a"), [candidate(node) for node in "yz"])
    first.unreachable(first.choose(), refused=False)
    assert first.choose() is None


def test_a_node_that_cannot_be_reached_is_waited_for_only_if_it_is_there():
    desks = MeetingPoints(Round(2, previous=("a", "b")), candidate("b", 2), [candidate("a")])
    desks.unreachable(desks.choose(), refused=False)
    assert desks.gone(candidate("a", 1))
    assert not desks.gone(candidate("a", 2))


@pytest.mark.parametrize(("me", "minimum", "left"), [("a", 1, "abc"), ("b", 2, "bc"), ("b", 3, "abc"), ("c", 1, "c")])
def test_those_that_let_their_turn_pass_are_left_out_if_the_minimum_allows(me, minimum, left):
    rows = [candidate(node) for node in "abc"]
    kept = in_time(Round(), rows, me, Limits(minimum, 5))
    assert "".join(member.node for member in kept) == left


# --- the pace --------------------------------------------------------------------------------------------------------


def test_one_that_leads_looks_at_once_and_then_less_and_less():
    pace = ReadSchedule(0.0)
    assert not pace.time_to_look(5.0)
    pace.lead(True, 5.0)
    assert pace.time_to_look(5.0)
    pauses = []
    now = 5.0
    for _ in range(12):
        pace.looked(now, float("inf"))
        pauses.append(pace._look_at - now)
        now = pace._look_at
    assert pauses[0] == pytest.approx(0.1)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(2.0)
    pace.called()
    assert pace._look_at <= now


def test_one_that_is_told_looks_seldom_but_in_time_for_its_turn():
    pace = ReadSchedule(0.0)
    pace.lead(False, 0.0)
    assert pace.rest(0.0) == pytest.approx(10.0)
    pace.looked(10.0, float("inf"))
    assert pace.rest(10.0) == pytest.approx(10.0)
    pace.looked(20.0, 3.0)
    assert pace.rest(20.0) == pytest.approx(3.0)


def test_many_that_come_at_once_are_decided_about_together():
    pace = ReadSchedule(0.0)
    pace.lead(True, 0.0)
    pace.looked(0.0, float("inf"))
    assert pace.time_to_weigh(0.0)
    for now in (0.001, 0.01):
        pace.woken()
        assert not pace.time_to_weigh(now)
        assert 0 < pace.rest(now) <= 0.02
    assert pace.time_to_weigh(0.021)
    assert not pace.time_to_weigh(0.05)


# --- room ------------------------------------------------------------------------------------------------------------


class Spares:
    """Watchers of rank 0's hub over several rounds."""

    def __init__(self):
        self.clock = Clock()
        self.watchers = Watchers(self.clock)

    def says(self, node: str, beside: int) -> None:
        before = self.watchers.get(node)
        peer = before.connection if before else Peer()
        self.watchers.add(node, Watcher(peer, self.clock.now, beside=beside))

    def seal(self, number: int, members: str, expected: str) -> None:
        self.watchers.enter(
            Round(number, "sealed", tuple(candidate(m, number) for m in members), expected=(*expected,))
        )

    def waiting(self, members: str = "") -> str:
        return "".join(sorted(self.watchers.waiting(members)))


def test_room_is_made_for_whoever_watches():
    spares = Spares()
    spares.seal(1, "a", "")
    spares.says("x", 1)
    spares.says("a", 1)
    assert spares.waiting("a") == "x"


def test_no_room_is_made_for_a_host_that_would_get_no_place():
    watchers = Watchers(Clock())
    watchers.enter(Round(1, "sealed", (candidate("a"),)))
    for node, strikes in (("x", 1), ("y", 2)):
        watchers.add(node, Watcher(Peer(), 0.0, beside=1, strikes=strikes))
    assert list(watchers.waiting("a", 2)) == ["x"]
    assert list(watchers.waiting("a")) == ["x", "y"]


def test_one_that_missed_the_seal_must_say_that_it_has_heard_of_it():
    spares = Spares()
    spares.seal(1, "a", "")
    spares.says("x", 1)
    spares.seal(2, "a", "ax")
    spares.clock.now += 1000
    assert spares.waiting("a") == ""  # a connection may be all that is left of it
    spares.says("x", 2)
    assert spares.waiting("a") == "x"


def test_one_that_never_comes_is_let_wait_longer_each_time_until_it_has_come():
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
