"""Selection of members from candidates with strikes: properties over random memberships."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.round import Limits, Member, Round
from azureml_elastic.node.core.sealing import SealTimer, candidates, is_complete, is_quarantined, seal, select_members

TIMINGS = RendezvousTimings(settle_timeout=10, rejoin_timeout=5, takeover_delay=1)


def waiting(node: str, strikes: int = 0, number: int = 3) -> Member:
    return Member(node, f"i-{node}", round=number, host="h", store_port=1, hub_port=2, strikes=strikes)


def names(members) -> list[str]:
    return [member.node for member in members]


nodes = [f"node-{k}" for k in range(8)]
limits = st.integers(1, 8).flatmap(
    lambda maximum: st.builds(Limits, st.integers(1, maximum), st.just(maximum), st.sampled_from([None, 1, 2, 3]))
)


@st.composite
def rounds(draw):
    """An open round, the rows that wait for it, and the limits."""
    present = draw(st.lists(st.sampled_from(nodes), unique=True))
    previous = draw(st.lists(st.sampled_from(nodes), unique=True))
    rows = [waiting(node, draw(st.integers(0, 4))) for node in present]
    return Round(number=3, previous=tuple(previous)), rows, draw(limits)


@given(case=rounds(), data=st.data())
def test_the_selection_does_not_depend_on_the_order_of_the_rows(case, data):
    round_, rows, limit = case
    again = data.draw(st.permutations(rows))
    assert seal(round_, rows, limit) == seal(round_, again, limit)


@given(case=rounds())
def test_members_are_distinct_candidates(case):
    round_, rows, limit = case
    members = seal(round_, rows, limit).members
    assert len(set(names(members))) == len(members)
    assert set(members) <= set(rows)


@given(case=rounds())
def test_the_minimum_is_reached_whenever_there_are_enough_nodes_of_any_strikes(case):
    round_, rows, limit = case
    fit = [member for member in rows if not is_quarantined(member, limit)]
    count = len(seal(round_, rows, limit).members)
    assert count == max(min(len(fit), limit.maximum), min(len(rows), limit.minimum))


@given(case=rounds())
def test_a_quarantined_node_is_a_member_only_where_the_minimum_needs_it(case):
    round_, rows, limit = case
    members = seal(round_, rows, limit).members
    excluded = [member for member in members if is_quarantined(member, limit)]
    fit = [member for member in rows if not is_quarantined(member, limit)]
    if excluded:
        assert len(members) == min(limit.minimum, len(rows))
        assert set(fit) <= set(members)
        assert list(members[-len(excluded) :]) == excluded, "the last ranks"
        left = [member for member in rows if member not in members]
        assert max(member.strikes for member in excluded) <= min((m.strikes for m in left), default=9)


@given(case=rounds())
def test_members_keep_the_order_of_ranks(case):
    round_, rows, limit = case
    fit = [member for member in seal(round_, rows, limit).members if not is_quarantined(member, limit)]
    assert fit == [member for member in candidates(round_, rows) if member in fit]
    survivors = [node for node in round_.previous if node in names(fit)]
    assert names(fit)[: len(survivors)] == survivors


@given(case=rounds())
def test_fewer_strikes_are_preferred_but_for_one_survivor(case):
    round_, rows, limit = case
    members = [member for member in seal(round_, rows, limit).members if not is_quarantined(member, limit)]
    left = [member for member in rows if member not in members and not is_quarantined(member, limit)]
    worse = [member for member in members if any(member.strikes > other.strikes for other in left)]
    assert len(worse) <= 1
    if worse:
        assert names(members)[0] == worse[0].node
        assert worse[0].node in round_.previous
        assert not any(member.node in round_.previous for member in members[1:])


@given(case=rounds())
def test_a_survivor_is_kept_where_there_is_one_that_is_not_quarantined(case):
    round_, rows, limit = case
    assume(limit.maximum > 1)
    fit = {member.node for member in rows if not is_quarantined(member, limit)}
    if fit & set(round_.previous):
        assert set(names(seal(round_, rows, limit).members)) & set(round_.previous)


@given(case=rounds())
def test_without_strikes_the_first_in_rank_order_get_the_places(case):
    round_, rows, limit = case
    clean = [waiting(member.node) for member in rows]
    assert list(seal(round_, clean, limit).members) == candidates(round_, clean)[: limit.maximum]


@given(case=rounds())
def test_the_round_is_sealed_exactly_if_there_are_enough_nodes(case):
    round_, rows, limit = case
    now = 100.0
    timers = {member.node: SealTimer(round_, limit, TIMINGS) for member in rows}
    sealers = []
    for _ in range(40):
        sealers += [node for node, one in timers.items() if one.is_due(rows, node, now)]
        now += 1
    assert bool(sealers) == (len(rows) >= limit.minimum)
    if sealers:
        assert sealers[0] == names(seal(round_, rows, limit).members)[0]
        assert set(sealers) == set(names(rows)), "each candidate takes over when all before it have died"


def test_a_spare_is_preferred_to_a_struck_survivor_and_the_ranks_stay():
    round_ = Round(number=3, previous=("a", "b", "c"))
    rows = [waiting("a"), waiting("b", 1), waiting("c"), waiting("spare")]
    assert names(seal(round_, rows, Limits(1, 3, 2)).members) == ["a", "c", "spare"]
    assert names(seal(round_, rows, Limits(1, 4, 2)).members) == ["a", "b", "c", "spare"]


def test_the_last_survivor_is_kept_for_its_memory_unless_it_is_quarantined():
    round_ = Round(number=3, previous=("a",))
    spares = [waiting("x"), waiting("y")]
    assert names(seal(round_, [waiting("a", 1), *spares], Limits(1, 2, 2)).members) == ["a", "x"]
    assert names(seal(round_, [waiting("a", 2), *spares], Limits(1, 2, 2)).members) == ["x", "y"]


def test_a_quarantined_rank_0_comes_back_last_where_the_minimum_needs_it():
    round_ = Round(number=3, previous=("a", "b"))
    rows = [waiting("a", 2), waiting("b")]
    assert names(seal(round_, rows, Limits(2, 3, 2)).members) == ["b", "a"]
    assert names(seal(round_, rows, Limits(1, 3, 2)).members) == ["b"]
    assert names(seal(round_, rows, Limits(1, 3, None)).members) == ["a", "b"]


def test_a_run_of_quarantined_hosts_alone_goes_on_with_its_minimum():
    rows = [waiting("a", 4), waiting("b", 2), waiting("c", 3)]
    assert names(seal(Round(number=3), rows, Limits(2, 3, 2)).members) == ["b", "c"]


def test_a_quarantined_node_is_not_waited_for():
    round_ = Round(number=3, previous=("a", "b"), expected=("a", "b"))
    assert is_complete(round_, [waiting("a"), waiting("b", 2, number=2)], Limits(1, 3, 2))
    assert not is_complete(round_, [waiting("a"), waiting("b", 1, number=2)], Limits(1, 3, 2))


def test_a_survivor_is_waited_for_although_spares_make_the_maximum_since_it_alone_may_hold_the_newest_state():
    round_ = Round(number=3, previous=("a", "b"), expected=("a", "b", "x", "y"))
    limit = Limits(1, 2)
    assert not is_complete(round_, [waiting("x"), waiting("y")], limit)
    assert not is_complete(round_, [waiting("a"), waiting("x")], limit), "the worker of a may be what has failed"
    assert is_complete(round_, [waiting("a"), waiting("b")], limit), "x and y will not be members"
    assert is_complete(round_, [waiting("a"), replace(waiting("b"), state="left"), waiting("x")], limit)


def test_a_quarantined_node_does_not_replace_one_that_is_expected():
    now = 100.0
    round_ = Round(number=3, previous=("a", "b"), expected=("a", "b"))
    timer = SealTimer(round_, Limits(2, 2, 2), TIMINGS)
    rows = [waiting("a"), waiting("b", 0, number=2), waiting("q", 2)]
    assert not timer.is_due(rows, "a", now)
    assert timer.next_change == pytest.approx(5)
    now += 5
    assert timer.is_due(rows, "a", now), "the quarantine does not end the run"


def test_strikes_are_part_of_the_rows():
    member = waiting("a", 2)
    assert Member.from_value(json.loads(json.dumps(member.to_value()))) == member
    sealed = seal(Round(number=3), [member], Limits(1, 1, 2))
    assert Round.from_value(json.loads(json.dumps(sealed.to_value()))) == sealed
    old = {name: value for name, value in member.to_value().items() if name not in ("strikes", "host_id")}
    assert Member.from_value(old).strikes == 0


def test_no_candidates_are_no_members():
    assert select_members(Round(), [], Limits(1, 4, 2)) == []
