"""With exact sums the parameters are bit-identical at any sequence of world sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_elastic.config import FixedGlobalBatch
from azureml_elastic.train.optim.exact_sum import exact_sum
from tests.support.train import gradients
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


TERMS = st.lists(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1, max_size=9
)


@pytest.mark.usefixtures("alone")
@given(terms=TERMS, data=st.data())
@settings(deadline=None)
def test_a_sum_does_not_depend_on_the_order_and_is_the_right_one(terms, data):
    like = [torch.zeros(3)]
    tensors = [[torch.tensor(term)] for term in terms]
    (found,) = exact_sum(tensors, like=like, count=9)
    (again,) = exact_sum(data.draw(st.permutations(tensors)), like=like, count=9)
    assert torch.equal(found, again)
    true = torch.tensor(terms, dtype=torch.float64).sum(0)
    largest = torch.tensor(terms, dtype=torch.float64).abs().max()
    close = (found.double() - true).abs() <= true.abs() * 2**-23 + largest * 2**-50 + 2.0**-149
    assert bool(((true.abs() > torch.finfo(torch.float32).max) | close).all())


@pytest.mark.usefixtures("alone")
def test_terms_that_are_missing_or_not_finite():
    like = [torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(0)]
    terms = [
        [torch.tensor([1.0, 2.0]), None, torch.tensor([float("inf"), 1.0]), torch.zeros(0)],
        [None, None, torch.tensor([1.0, 1.0]), None],
    ]
    first, second, third, fourth = exact_sum(terms, like=like, count=2)
    assert first.tolist() == [1.0, 2.0]
    assert second is None
    assert third.isnan().all()
    assert fourth.shape == (0,)
