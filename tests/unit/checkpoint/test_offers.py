"""All ranks continue from the furthest state of which all is there: a table of cases, and any offers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.format.manifest import FolderName
from azureml_elastic.checkpoint.load.offers import Kind, Offer, choose, deal_out
from tests.support.shards import describe


def whole(step, holder=0, number=1, rank=None, position=""):
    """Return the offer of a whole state that a process of a round has, or had."""
    return Offer(Kind.WHOLE, step, number, position, number, holder if rank is None else rank, holder)


def part(step, form, holder=0, origin=1, number=1):
    """Return the offer of a part of a sharded state."""
    return Offer(Kind.PART, step, origin, "", number, holder, holder, form, 0)


def shard(step, rank, world_size=2, holder=0, number=1, size=10):
    """Return the offer of a shard of a snapshot."""
    folder = str(FolderName(step, number, "00000000"))
    return Offer.of_shard(describe(folder, bytes(size), rank=rank, step=step, world_size=world_size), holder)


SNAPSHOT_OF_6 = [shard(6, 0), shard(6, 1, holder=1)]

CASES = {
    "nothing": ([], 4, []),
    "a state of this process": ([whole(5)], 4, [0]),
    "a state before any checkpoint": ([whole(0)], None, [0]),
    "the step of the checkpoint": ([whole(4)], 4, [0]),
    "behind the checkpoint": ([whole(3)], 4, []),
    "the furthest": ([whole(5), whole(6, 1), whole(5, 2)], 4, [1]),
    "all of the furthest, the lowest rank first": ([whole(6, 2), whole(5, 1), whole(6, 0)], 4, [2, 0]),
    "the lowest rank of its own round": ([whole(6, 0, rank=3), whole(6, 1, rank=2)], 4, [1, 0]),
    "of two rounds the newer": ([whole(6, 0, number=2), whole(6, 1, number=3)], 4, [1]),
    "of two positions one": ([whole(6, 0, position="a"), whole(6, 1, position="b")], 4, [0]),
    "a process of a node whose other one has the same": ([whole(6, 1, rank=0), whole(6, 0, rank=0)], 4, [1, 0]),
    "parts": ([part(5, "a"), part(5, "b", 1)], 4, [0, 1]),
    "parts of the checkpoint's step": ([part(4, "a"), part(4, "b", 1)], 4, [0, 1]),
    "parts behind the checkpoint": ([part(3, "a"), part(3, "b", 1)], 4, []),
    "parts of a step that two rounds have trained": ([part(5, "a", origin=2), part(5, "b", 1, origin=3)], 4, [1]),
    "the main part is of the newest round": ([part(5, "a", number=2), part(5, "b", 1, number=3)], 4, [1, 0]),
    "a snapshot": (SNAPSHOT_OF_6, 4, [0, 1]),
    "a snapshot before any checkpoint": (SNAPSHOT_OF_6, None, [0, 1]),
    "a snapshot of the checkpoint's step": (SNAPSHOT_OF_6, 6, []),
    "a snapshot without a shard": ([shard(7, 0, 3), shard(7, 2, 3)], 4, []),
    "the shard of another snapshot": ([shard(6, 0), shard(6, 1, number=2)], 4, []),
    "the newest complete snapshot": ([shard(7, 0), *SNAPSHOT_OF_6, shard(5, 0), shard(5, 1)], 4, [1, 2]),
    "of one step the newer round's snapshot": ([shard(6, 0, 1), shard(6, 0, 1, number=2)], 4, [1]),
    "all replicas of a snapshot": ([*SNAPSHOT_OF_6, shard(6, 0, holder=1)], 4, [0, 2, 1]),
    "a whole state before a snapshot": ([*SNAPSHOT_OF_6, whole(5, 2)], 4, [2]),
    "a whole state before parts": ([part(6, "a"), whole(5, 1)], 4, [1]),
    "a snapshot that is further than parts": ([part(5, "a"), *SNAPSHOT_OF_6], 4, [1, 2]),
    "parts as far as a snapshot": ([*SNAPSHOT_OF_6, part(6, "a")], 4, [2]),
    "a snapshot beyond what is behind the checkpoint": ([whole(3), *SNAPSHOT_OF_6], 4, [1, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_chosen(case):
    offers, committed, expected = CASES[case]
    assert choose(offers, committed) == [offers[number] for number in expected]
    shuffled = offers.copy()
    random.Random(case).shuffle(shuffled)
    assert choose(shuffled, committed) == [offers[number] for number in expected], "ranks may gather in any order"


numbers = st.integers(0, 2)
any_offers = st.one_of(
    st.builds(whole, step=numbers, holder=numbers, number=st.integers(1, 3), rank=numbers),
    st.builds(part, step=numbers, form=st.sampled_from("ab"), holder=numbers, origin=st.integers(1, 3)),
    st.builds(shard, step=numbers, rank=st.integers(0, 1), holder=numbers, number=st.integers(1, 2)),
)


@given(st.lists(any_offers, max_size=12), st.none() | st.integers(-1, 3))
def test_nothing_that_counts_is_before_what_is_chosen(offers, committed):
    chosen, after = choose(offers, committed), -1 if committed is None else committed
    counting = [each for each in offers if each.step > after or (each.step == after and each.kind != Kind.SHARD)]
    ranks = {(each.state, each.rank) for each in counting if each.kind == Kind.SHARD}
    complete = [each for each in counting if each.kind != Kind.SHARD or {(each.state, 0), (each.state, 1)} <= ranks]
    first = [each for each in complete if each.kind == Kind.WHOLE] or complete
    furthest = [each for each in first if each.step == max(other.step for other in first)]
    assert bool(chosen) == bool(furthest)
    if chosen:
        assert chosen[0] in furthest
        assert sorted(map(id, chosen)) == sorted(id(each) for each in offers if each.state == chosen[0].state)
        assert chosen[0].kind != Kind.WHOLE or chosen[0].round == max(each.round for each in furthest)


def test_each_shard_is_written_once_and_the_holders_share_them():
    offers = [shard(6, rank, 4, holder=holder) for rank in range(4) for holder in range(2)]
    written = deal_out(choose(offers, None))
    assert [(each.rank, each.holder) for each in written] == [(0, 0), (1, 1), (2, 0), (3, 1)]
