"""With exact sums the parameters are bit-identical at any sequence of world sizes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from azureml_elastic import train
from azureml_elastic.config import FixedGlobalBatch
from azureml_elastic.train.optim.exact_sum import ExactSum
from tests.support.train import gradients, workers
from tests.support.worlds import World

EXACT = FixedGlobalBatch(logical_workers=12, reduce="exact")
FLOATING = FixedGlobalBatch(logical_workers=12)


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hashes(outcomes):
    return {outcome["hash"] for outcome in outcomes}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    (found,) = hashes(World(1, gradients.train_exactly, tmp_path_factory.mktemp("static"), 4, EXACT).values())
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 12, 13])
def test_any_world_size_gives_the_same_bits(world_size, undisturbed, tmp_path):
    assert hashes(World(world_size, gradients.train_exactly, tmp_path, 4, EXACT).values()) == {undisturbed}


@pytest.mark.parametrize("processes", [0, 2])
def test_a_world_that_changes_and_dies_gives_the_bits_of_a_static_one(processes, undisturbed, tmp_path):
    where = (gradients.train_exactly, tmp_path, 4, EXACT)
    for world_size, dies_at in ((1, 3), (4, 6), (2, 9)):
        outcomes = World(world_size, *where, dies_at, 2, processes).outcomes()
        assert [outcome.code for outcome in outcomes] == [9] * world_size
    found = World(3, *where, None, 2, processes).values()
    assert {outcome["first"] for outcome in found} == {8}
    assert hashes(found) == {undisturbed}


def test_floating_sums_differ(tmp_path):
    found = [
        hashes(World(world_size, gradients.train_exactly, tmp_path / str(world_size), 4, FLOATING).values())
        for world_size in (1, 3)
    ]
    assert found[0] != found[1]


def sum_of(terms, like):
    total = ExactSum(like)
    for term in terms:
        total.add(term)
    return total.finish()


def partial_sums(folder, terms, like, shares):
    """Return the sums of two steps, of which the first was interrupted."""
    run = train.start(workers.policy(folder))
    total = ExactSum(like)
    total.add([torch.full_like(each, 7) for each in like])
    total.clear()
    for index in shares[run.rank]:
        total.add(terms[index])
    return [None if each is None else each.numpy() for each in total.finish()]


TERMS = st.lists(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1, max_size=9
)


@pytest.mark.usefixtures("alone")
@given(terms=TERMS, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), data=st.data())
@settings(deadline=None)
def test_a_sum_does_not_depend_on_the_order_and_is_the_right_one(terms, dtype, data):
    like = [torch.zeros(3, dtype=dtype)]
    tensors = [[torch.tensor(term, dtype=dtype)] for term in terms]
    assume(all(term[0].isfinite().all() for term in tensors))
    (found,) = sum_of(tensors, like)
    (again,) = sum_of(data.draw(st.permutations(tensors)), like)
    assert found.dtype == dtype
    assert torch.equal(found, again)
    doubles = torch.stack([term[0].double() for term in tensors])
    # A sum of floats would be further off than what is allowed, where terms cancel each other out.
    true = torch.tensor([math.fsum(each) for each in doubles.T.tolist()], dtype=torch.float64)
    largest = doubles.abs().max()
    bits = 56 if dtype == torch.float64 else 24
    close = (found.double() - true).abs() <= true.abs() * torch.finfo(dtype).eps + largest * 2.0**-bits + 2.0**-120
    assert bool(((true.abs() > torch.finfo(torch.float32).max) | close).all())


SIZES = [(3, 5), (0,), (), (256,), (400_000,), (257, 3), (131_072,), (131_073,)]


def mixed_terms(count):
    """Return terms with tensors that are shared, whole and cut, some of them missing, and their shapes."""
    random = torch.Generator().manual_seed(1)
    like = [torch.zeros(size) for size in SIZES] + [torch.zeros(4, dtype=torch.int64), torch.zeros(9).double()]
    like += [torch.zeros(70, 30), torch.zeros(400_000)]  # of which no rank has a term
    terms = []
    for number in range(count):
        scale = 10.0 ** (number % 5 - 2)
        term = [torch.randn(each.shape, generator=random).to(each.dtype) * scale for each in like[:8]]
        term += [torch.tensor([number, -3, 1 << 40, 0]), torch.randn(9, generator=random).double()]
        terms.append([None if (number + place) % 4 == 0 else each for place, each in enumerate(term)] + [None, None])
    return terms, like


def test_ranks_with_any_shares_of_the_terms_have_the_same_sum(tmp_path):
    terms, like = mixed_terms(6)
    shares = [[0, 1, 2, 3, 4, 5]], [[5, 1], [4, 0, 2, 3]], [[], [3, 2, 1], [0, 4, 5]]
    found = [
        value
        for number, each in enumerate(shares)
        for value in World(len(each), partial_sums, tmp_path / str(number), terms, like, each).values()
    ]
    for place, each in enumerate(like):
        present = [term[place] for term in terms if term[place] is not None]
        if not present:
            assert [value[place] for value in found] == [None] * 6
            continue
        sums = [torch.from_numpy(value[place]) for value in found]
        assert all(torch.equal(sums[0], other) and other.shape == each.shape for other in sums)
        largest = max((float(term.abs().max()) for term in present if term.numel()), default=0.0)
        true = sum(term.double() for term in present)
        assert torch.allclose(sums[0].double(), true, rtol=2.0**-24, atol=largest * 2.0**-24)


@pytest.mark.usefixtures("alone")
def test_many_terms_that_are_as_large_as_can_be_fit():
    value = torch.tensor([1.0 - 2**-19, -1.0])
    for count in (1, 2, 3, 1024):
        (found,) = sum_of([[value]] * count, [torch.zeros(2)])
        assert found.tolist() == (value * count).tolist()


@pytest.mark.usefixtures("alone")
def test_small_numbers_keep_their_bits_beside_tensors_of_large_ones():
    terms = [[torch.full((100,), 1e30), torch.full((100,), 1e-30)]] * 2
    large, small = sum_of(terms, [torch.zeros(100), torch.zeros(100)])
    assert torch.equal(large, terms[0][0] * 2)
    assert torch.equal(small, terms[0][1] * 2)


@pytest.mark.usefixtures("alone")
def test_terms_that_are_missing_or_not_finite():
    like = [torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(0), torch.zeros(2)]
    terms = [
        [torch.tensor([1.0, 2.0]), None, torch.tensor([float("inf"), 1.0]), torch.zeros(0), None],
        [None, None, torch.tensor([1.0, 1.0]), None, torch.tensor([float("nan"), 1.0])],
    ]
    first, second, third, fourth, fifth = sum_of(terms, like)
    assert first.tolist() == [1.0, 2.0]
    assert second is None
    assert third.isnan().all()
    assert fourth.shape == (0,)
    assert fifth.isnan().all()
