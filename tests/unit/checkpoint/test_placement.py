"""The write plan: each element is written once, by a rank that holds it, and all ranks write about as much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.format.shard_file import Chunk, assign

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def whole(number, shape, itemsize=4):
    return Chunk(f"t{number}", (0,) * len(shape), shape, shape, "float32", itemsize)


def cells(chunks):
    """Return every element that some chunks hold."""
    found = []
    for chunk in chunks:
        indices = [()]
        for offset, size in zip(chunk.offsets, chunk.sizes, strict=True):
            indices = [(*index, place) for index in indices for place in range(offset, offset + size)]
        found += [(chunk.name, index) for index in indices]
    return found


def test_cells_are_all_elements():
    assert cells([Chunk("t", (1, 2), (2, 1), (3, 3), "float32", 4)]) == [("t", (1, 2)), ("t", (2, 2))]


@given(st.lists(st.tuples(SHAPES, st.sets(st.integers(0, 4), min_size=1)), max_size=8))
def test_each_element_is_written_once_by_a_rank_that_holds_it(tensors):
    held = [[] for _ in range(5)]
    for number, (shape, ranks) in enumerate(tensors):
        for rank in ranks:
            held[rank].append(whole(number, shape, 16_384))  # large enough to be cut
    written = assign(held)
    assert assign(held) == written
    everything = cells({chunk for chunks in held for chunk in chunks})
    assert sorted(cells(chunk for chunks in written for chunk in chunks)) == sorted(everything)
    for rank, chunks in enumerate(written):
        names = {chunk.name for chunk in held[rank]}
        assert {chunk.name for chunk in chunks} <= names


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=20),
    st.lists(st.integers(0, 3000), max_size=9),
)
def test_all_ranks_write_about_as_many_bytes(ranks, shapes, alone):
    held = [[whole(number, shape) for number, shape in enumerate(shapes)] for _ in range(ranks)]
    for rank, rows in enumerate(alone[:ranks]):
        held[rank].append(whole(100 + rank, (rows, 100)))
    loads = [sum(chunk.nbytes for chunk in chunks) for chunks in assign(held)]
    fair = sum(loads) / ranks
    row = max(columns for _, columns in shapes) * 4
    own = max([rows * 400 for rows in alone[:ranks]], default=0)
    # A rank exceeds its part by data that it alone holds, by a row, or by a tensor that is too small to be cut.
    assert max(loads) <= max(fair, own) + row + 2 * (1 << 16)


def test_one_large_tensor_is_cut_for_all_ranks():
    huge = whole(0, (50_000, 1000))
    written = assign([[huge], [huge], [huge], [huge]])
    assert [[chunk.sizes[0] for chunk in chunks] for chunks in written] == [[12_500]] * 4
    assert [chunks[0].offsets[0] for chunks in written] == [0, 12_500, 25_000, 37_500]


def test_owners_of_large_shards_write_less_of_the_shared_tensors():
    shards = [Chunk("sharded", (10 * rank, 0), (10, 100_000), (20, 100_000), "float32", 4) for rank in range(2)]
    shared = whole(1, (100, 10_000))
    first, second = assign([[shards[0], shared], [shards[1], shared]])
    assert first[0] == shards[0]
    assert second[0] == shards[1]
    assert [chunk.sizes[0] for chunk in (first[1], second[1])] == [50, 50]
