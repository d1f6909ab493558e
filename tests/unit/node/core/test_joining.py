"""Where nodes that wait for an open round meet, and when they read the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.joining import MeetingPoints, ReadSchedule, is_landmark
from azureml_elastic.node.core.round import Limits, Member, Round
from azureml_elastic.node.core.sealing import Candidacy, Verdict, drop_unresponsive


def candidate(node: str, number: int = 1) -> Member:
    return Member(node, f"i-{node}", round=number, host=node, hub_port=1)


def known(rows: Iterable[Member]) -> dict[str, Member]:
    return {row.node: row for row in rows}


def starting(node: str) -> Member:
    return replace(candidate(node), state="starting", round=0)


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
        points.update({})  # a table that was cleaned
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
    for _ in range(3):
        assert points.choose().node == "b"
        points.connection_broke(points.choose(), answered=True)
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


def test_the_time_of_a_read_does_not_count_for_a_survivor_that_does_not_come():
    me, round_ = candidate("a", 3), Round(3, previous=("a", "b"), expected=("a", "b"))
    mine = Candidacy(round_, me, {}, Limits(1, 2), RendezvousTimings(), 0.0, wrote_round=False)
    mine.decide([], me, 0.0)
    for mine.read_began, answered, verdict in ((1.0, 10.0, Verdict.WAIT), (10.0, 10.1, Verdict.CONFIRM)):
        mine.read({"a": me.to_value()}, me, answered)
        assert mine.decide([], me, answered) is verdict


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


def test_who_knows_all_reads_only_when_they_do_not_come():
    schedule = ReadSchedule(0.0, knows_all=True)
    schedule.set_active(True, 5.0)
    assert not schedule.should_read(5.09)
    assert schedule.should_read(5.1)


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
