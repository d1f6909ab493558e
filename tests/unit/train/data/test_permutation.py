"""The order of an epoch: every sample once, uniformly random, and each part computed independently."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.train.data.sampling import Permutation


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_it_is_a_permutation(length, key):
    assert sorted(Permutation(length, key)(np.arange(length)).tolist()) == list(range(length))


@given(st.integers(1, 2**62 - 1), st.integers(0, 2**64 - 1), st.data())
def test_a_part_is_what_it_is_in_the_whole(length, key, data):
    start = data.draw(st.integers(0, length - 1))
    stop = min(length, start + data.draw(st.integers(1, 50)))
    permutation = Permutation(length, key)
    part = permutation(np.arange(start, stop)).tolist()
    assert part == [int(permutation(np.arange(at, at + 1))[0]) for at in range(start, stop)]
    assert len(set(part)) == stop - start
    assert all(0 <= each < length for each in part)


def chi_squared(counts, cells, total):
    expected = total / cells
    return sum((counts.get(cell, 0) - expected) ** 2 / expected for cell in range(cells))


@pytest.mark.parametrize("length", [4, 10, 31])
def test_every_sample_is_as_likely_at_every_position(length):
    orders = np.stack([Permutation(length, key)(np.arange(length)) for key in range(4000)])
    for position in range(length):
        found = chi_squared(Counter(orders[:, position].tolist()), length, len(orders))
        assert found < length + 6 * (2 * length) ** 0.5  # six standard deviations


def test_every_order_is_as_likely():
    codes = Counter(tuple(Permutation(4, key)(np.arange(4)).tolist()) for key in range(24_000))
    assert len(codes) == 24
    assert all(800 < count < 1200 for count in codes.values())


def test_neighbours_have_nothing_to_do_with_each_other():
    order = Permutation(100_000, 3)(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.02


def test_a_billion_samples_need_no_list_of_them():
    tracemalloc.start()
    part = Permutation(10**9, 7)(np.arange(500_000_000, 500_000_256))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(part.tolist())) == 256
    assert peak < 1 << 20  # a list of all positions takes gigabytes
