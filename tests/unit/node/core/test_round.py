"""Decisions about rounds, over all kinds of memberships."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.failures import FailureRecord
from azureml_elastic.node.core.round import Limits, Member, Round, reopened, turn_of
from azureml_elastic.node.core.sealing import SealTimer, candidates, is_complete, seal
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.table.values import write_value

FAILURE = FailureRecord("1234abcd ValueError: no (train.py:3 f)", "user", 5, "node-1", 1, 7, 2.5)
TIMINGS = RendezvousTimings(settle_timeout=10, rejoin_timeout=5, takeover_delay=1)


def waiting(node: str, number: int = 1, slots: int = 1) -> Member:
    return Member(node, f"i-{node}", round=number, host="h", store_port=1, hub_port=2, slots=slots)


names = st.lists(st.sampled_from([f"node-{k}" for k in range(12)]), unique=True, max_size=12)


@given(previous=names, present=names, strangers=names, data=st.data())
def test_survivors_keep_their_order_and_come_first(previous, present, strangers, data):
    round_ = Round(number=3, previous=tuple(previous))
    rows = [waiting(node, 3) for node in data.draw(st.permutations(present))]
    rows += [waiting(node, 2) for node in strangers if node not in present]
    order = [member.node for member in candidates(round_, rows)]
    survivors = [node for node in previous if node in present]
    assert order[: len(survivors)] == survivors
    assert sorted(order) == sorted(present)
    assert order[len(survivors) :] == sorted(set(present) - set(previous))


@given(present=names, maximum=st.integers(1, 12))
def test_a_sealed_round_has_at_most_the_maximum_and_consecutive_ranks(present, maximum):
    sealed = seal(Round(), [waiting(node, slots=2) for node in present], Limits(1, maximum))
    assert len(sealed.members) == min(len(present), maximum)
    ranks = [rank for k in range(len(sealed.members)) for rank in Assignment(sealed, k, None).global_ranks]
    assert ranks == list(range(sealed.world_size))
    for rank, member in enumerate(sealed.members):
        assert sealed.rank_of(member.node, member.incarnation) == rank
        assert sealed.rank_of(member.node, "another incarnation") is None


@given(members=names, lost=names, spare=names)
def test_a_reopened_round_expects_survivors_and_spares_but_not_the_lost_unless_they_have_returned(members, lost, spare):
    sealed = replace(Round(number=4), state="sealed", members=tuple(waiting(node, 4) for node in members))
    next_ = reopened(sealed, "because", lost, spare)
    assert (next_.number, next_.state) == (5, "open")
    assert set(next_.expected) == (set(members) - set(lost)) | set(spare)
    assert len(next_.expected) == len(set(next_.expected))
    assert next_.previous == tuple(node for node in members if node not in lost)


def test_a_reopened_round_carries_the_runs_failures_and_their_ages_on():
    sealed = Round(number=4, state="sealed", failures=(FAILURE,))
    (older,) = reopened(sealed, "lost", ["b"], seconds=10).failures
    assert older == replace(FAILURE, age_seconds=12.5)
    # A node that was not in the round does not know its duration.
    assert reopened(sealed, "no sign of life").failures == (FAILURE,)
    both = (older, replace(FAILURE, node="node-2"))
    assert reopened(sealed, "a worker failed", failures=both, seconds=10).failures == both


@given(members=names, expected=names)
def test_rows_survive_json(members, expected):
    round_ = Round(2, "sealed", tuple(waiting(node, 2) for node in members), expected=tuple(expected), message="é\n")
    round_ = replace(round_, failures=(FAILURE, replace(FAILURE, step=None)))
    assert Round.from_value(json.loads(json.dumps(round_.to_value()))) == round_


def test_fields_of_later_releases_are_ignored():
    assert Round.from_value({**Round().to_value(), "colour": "red"}) == Round()
    assert Member.from_value({**waiting("a").to_value(), "colour": "red"}) == waiting("a")


def test_the_minimum_starts_at_once():
    timer = SealTimer(Round(), Limits(2, 8), TIMINGS)
    assert not timer.is_due([waiting("a")], "a", 100.0)
    assert timer.is_due([waiting("a"), waiting("b")], "a", 100.0)


def test_the_first_round_waits_for_nodes_that_still_import_up_to_the_timeout():
    now = 100.0
    timer = SealTimer(Round(), Limits(1, 8), TIMINGS)
    rows = [waiting("a"), Member("b", "i", state="starting")]
    assert not timer.is_due(rows, "a", now)
    assert timer.next_change == pytest.approx(10)
    now += 9.9
    assert not timer.is_due(rows, "a", now)
    now += 0.2
    assert timer.is_due(rows, "a", now)


def test_a_full_round_waits_for_no_other_node():
    timer = SealTimer(Round(), Limits(1, 1), TIMINGS)
    assert timer.is_due([waiting("a"), Member("b", "i", state="starting")], "a", 100.0)


def test_a_reopened_round_waits_for_the_survivors():
    now = 100.0
    round_ = Round(number=2, previous=("a", "b"), expected=("a", "b"))
    timer = SealTimer(round_, Limits(1, 3), TIMINGS)
    assert not timer.is_due([waiting("a", 2), waiting("b", 1)], "a", now)
    now += 5
    assert timer.is_due([waiting("a", 2), waiting("b", 1)], "a", now)


def test_a_survivor_that_has_left_is_not_waited_for():
    round_ = Round(number=2, previous=("a", "b"), expected=("a", "b"))
    rows = [waiting("a", 2), Member("b", "i", state="left", round=1)]
    assert is_complete(round_, rows, Limits(1, 3))


def test_the_next_round_waits_until_a_preempted_node_has_saved_and_left():
    """What its workers save is what a program without a session continues from."""
    sealed = Round(number=1, state="sealed", members=(waiting("a"), waiting("b")))
    round_ = reopened(sealed, "preempted: b", ["b"], finishing=["b"], finishing_seconds=25)
    round_ = Round.from_value(json.loads(json.dumps(round_.to_value())))
    now, rows = 100.0, [waiting("a", 2), waiting("b", 1)]
    timer, late = (SealTimer(round_, Limits(1, 3), TIMINGS) for _ in range(2))
    assert not timer.is_due(rows, "a", now)
    now += 24
    assert not timer.is_due(rows, "a", now)
    assert timer.next_change == pytest.approx(1)
    assert timer.is_due([waiting("a", 2), Member("b", "i", state="left", round=1)], "a", now)
    assert not late.is_due(rows, "a", now)
    now += 25
    assert late.is_due(rows, "a", now), "it has died before it could leave"


def test_the_next_candidate_seals_when_the_first_does_not():
    now = 100.0
    rows = [waiting("a"), waiting("b"), waiting("c")]
    second, third = (SealTimer(Round(), Limits(1, 3), TIMINGS) for _ in range(2))
    assert not second.is_due(rows, "b", now)
    assert not third.is_due(rows, "c", now)
    now += 1
    assert second.is_due(rows, "b", now)
    assert not third.is_due(rows, "c", now)
    now += 1
    assert third.is_due(rows, "c", now)


def test_a_node_that_is_no_candidate_does_not_seal():
    assert not SealTimer(Round(), Limits(1, 3), TIMINGS).is_due([waiting("a")], "b", 100.0)


@pytest.mark.parametrize(
    ("lost", "informed", "node", "expected"),
    [
        ("d", "d", "a", (0.0, "a")),
        ("d", "d", "b", (10.0, "a")),  # rank 0 is about to end the round, however long the table takes
        ("d", "d", "c", (10.0, "a")),
        ("d", "", "c", (0.1, "a")),  # rank 0 may not know
        ("cd", "d", "b", (0.05, "a")),
        ("", "", "b", (0.05, "a")),
        ("ad", "d", "b", (0.0, "b")),
        ("a", "a", "c", (0.05, "b")),  # b may not know
    ],
)
def test_survivors_leave_the_end_of_a_round_to_the_first_of_them(lost, informed, node, expected):
    round_ = Round(1, "sealed", tuple(waiting(each) for each in "abcd"))
    seconds, first = turn_of(round_, [*lost], node, informed=[*informed])
    assert (pytest.approx(seconds), first.node) == expected


def test_a_round_of_a_thousand_nodes_with_the_longest_names_fits_a_row_of_the_table():
    longest = [f"{number:063d}-{'a' * 6}" for number in range(1000)]

    def row(node: str) -> Member:
        return Member(
            node, "i" * 12, "waiting", 99999, "255.255.255.255", 65535, 65535, 8, "", f"255.255.255.255-{'b' * 8}"
        )

    limits = Limits(1, 1000)
    first = replace(seal(Round(), [replace(row(node), round=1) for node in longest], limits), number=99998)
    open_ = reopened(first, "r" * 500, longest[:1], ["s" * 70], failures=(FAILURE,) * 20)
    sealed = seal(open_, [row(node) for node in [*longest[1:], "s" * 70]], limits)
    assert len(sealed.members) == 1000
    write_value("round", sealed.to_value())
