"""Rounds of whole replicas: properties over random losses and newcomers, and some cases in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.node.core.hub_state import HubReports, HubView
from azureml_elastic.node.core.round import Limits, Member, Round, reopened
from azureml_elastic.node.core.sealing import seal
from azureml_elastic.node.core.watchers import Watcher, Watchers


def waiting(node: str, number: int, strikes: int = 0) -> Member:
    return Member(node, f"i-{node}", round=number, host="h", store_port=1, hub_port=2, strikes=strikes)


def names(members) -> list[str]:
    return [member.node for member in members]


def sealed(present, limits: Limits, open_: Round | None = None, strikes=lambda _: 0) -> Round:
    open_ = open_ or Round()
    return seal(open_, [waiting(node, open_.number, strikes(node)) for node in present], limits)


def after(round_: Round, lost, new, limits: Limits, strikes=lambda _: 0) -> Round:
    open_ = reopened(round_, "lost", lost)
    return sealed([*open_.previous, *new], limits, Round.from_value(open_.to_value()), strikes)


def replicas_of(round_: Round) -> list[list[str]]:
    members, size = names(round_.members), round_.nodes_per_replica
    return [members[begin : begin + size] for begin in range(0, len(members), size)]


@st.composite
def losses(draw):
    """A sealed round of whole replicas, what happens to it, and the limits."""
    size = draw(st.integers(1, 4))
    count = draw(st.integers(1, 4))
    limits = Limits(size * draw(st.integers(1, count)), size * draw(st.integers(count, 5)), 3, size)
    first = sealed([f"n{number:02d}" for number in range(size * count)], limits)
    lost = draw(st.sets(st.sampled_from(names(first.members)), max_size=size * count - 1))
    new = [f"x{number}" for number in range(draw(st.integers(0, 2 * size)))]
    struck = draw(st.dictionaries(st.sampled_from([*names(first.members), *new]), st.integers(0, 3)))
    return first, lost, new, limits, struck


@given(case=losses())
def test_a_round_has_as_many_whole_replicas_as_there_are_nodes_for(case):
    first, lost, new, limits, _ = case
    size, present = limits.nodes_per_replica, len(first.members) - len(lost) + len(new)
    count = len(after(first, lost, new, limits).members)
    assert count == min(present, limits.maximum) // size * size


@given(case=losses())
def test_no_node_is_a_member_twice_whatever_counts_against_it(case):
    first, lost, new, limits, struck = case
    members = names(after(first, lost, new, limits, lambda node: struck.get(node, 0)).members)
    assert len(members) == len(set(members))
    assert len(members) % limits.nodes_per_replica == 0
    assert set(members) <= {*names(first.members), *new} - lost


@given(case=losses())
def test_replicas_that_have_lost_nobody_stay_together_in_their_order(case):
    first, lost, new, limits, _ = case
    whole = [each for each in replicas_of(first) if not lost & set(each)]
    found = replicas_of(after(first, lost, new, limits))
    if len(found) >= len(whole):
        assert found[: len(whole)] == whole


@given(case=losses())
def test_what_is_left_of_every_place_is_taken(case):
    first, lost, new, limits, struck = case
    size = limits.nodes_per_replica
    next_ = after(first, lost, new, limits, lambda node: min(2, struck.get(node, 0)))
    place_of = {node: place for each in replicas_of(first) for place, node in enumerate(each)}
    if size > 1 and next_.members:
        survivors = {place_of[node] for node in names(first.members) if node not in lost}
        taken = {place_of[node] for node in names(next_.members) if node in place_of}
        assert taken == survivors, "a shard that a survivor holds would be lost"


@given(case=losses())
def test_survivors_of_broken_replicas_keep_their_places_where_two_do_not_want_the_same(case):
    first, lost, new, limits, _ = case
    size = limits.nodes_per_replica
    place_of = {node: place for each in replicas_of(first) for place, node in enumerate(each)}
    found = replicas_of(after(first, lost, new, limits))
    moved = [node for each in found for place, node in enumerate(each) if node in place_of and place_of[node] != place]
    wanted = [place_of[node] for each in found for node in each if node in place_of]
    crowded = any(wanted.count(place) > len(found) for place in range(size))
    rotated = bool(found) and not all(node in place_of and place_of[node] == 0 for node in found[0][:1])
    assert not moved or crowded or rotated


@given(case=losses())
def test_rank_0_is_a_survivor_where_one_is_a_member(case):
    first, lost, new, limits, _ = case
    next_ = after(first, lost, new, limits)
    if any(node in names(first.members) for node in names(next_.members)):
        assert next_.members[0].node in names(first.members)


def test_a_node_whose_partner_is_lost_waits_until_another_one_comes():
    limits = Limits(2, 6, None, 2)
    first = sealed(["a", "b", "c", "d", "e", "f"], limits)
    second = after(first, {"c"}, [], limits)
    assert replicas_of(second) == [["a", "b"], ["e", "f"]]
    third = after(second, set(), ["d", "g"], limits)
    assert replicas_of(third) == [["a", "b"], ["e", "f"], ["d", "g"]]


def test_the_rest_of_two_broken_replicas_is_one_again():
    limits = Limits(2, 4, None, 2)
    first = sealed(["a", "b", "c", "d"], limits)
    assert replicas_of(after(first, {"a", "d"}, [], limits)) == [["c", "b"]]
    assert replicas_of(after(first, {"a", "c"}, ["x", "y"], limits)) == [["b", "x"], ["y", "d"]]


def test_what_whole_replicas_leave_over_has_missed_nothing():
    limits = Limits(2, 6, None, 2)
    watchers = Watchers()
    round_ = sealed(["a", "b", "c", "d"], limits)
    for _ in range(3):  # a node that misses seals waits longer each time
        round_ = after(round_, set(), ["e"], limits)
        watchers.enter(replace(round_, expected=(*names(round_.members), "e")))
    for node in ("e", "f"):
        watchers.add(node, Watcher(1, 10.0, beside=round_.number))
    assert set(watchers.waiting(names(round_.members), 10.0)) == {"e", "f"}


@pytest.mark.parametrize(("spares", "makes_room"), [(1, False), (2, True), (3, True)])
def test_room_is_made_for_whole_replicas_only(spares, makes_room):
    limits = Limits(2, 6, None, 2)
    round_ = sealed(["a", "b", "c", "d"], limits)
    view = HubView(waiting_since={f"s{number}": 0.0 for number in range(spares)})
    seen = HubReports().see(round_, "a", view, over=False, limits=limits, debounce=1.0, now=100.0)
    assert bool(seen.waiting) is makes_room
