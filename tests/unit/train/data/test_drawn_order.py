"""The order of a script's own sampler: the same in each process, for samples and for whole batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.drawn_order import DrawnOrder


class WithEpoch:
    """A sampler that receives its epoch, and yet draws from one sequence and from NumPy's global generator."""

    def __init__(self):
        self.epoch, self.generator = 0, torch.Generator().manual_seed(3)

    def __len__(self):
        return 10

    def __iter__(self):
        yield from torch.randperm(10, generator=self.generator).add(10 * self.epoch).tolist()[:9]
        yield np.random.randint(100) + 1000  # noqa: NPY002 - as scripts do

    def set_epoch(self, epoch):
        self.epoch = epoch


def weighted():
    return WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 12, generator=torch.Generator().manual_seed(0))


def drawn(sampler, whole_batches=False):
    return DrawnOrder(sampler, whole_batches=whole_batches, seed=5, agree=lambda value: value)


def test_the_first_epochs_are_those_of_the_sampler_itself():
    order, sampler = drawn(weighted()), weighted()
    for epoch in range(3):
        assert order.samples(epoch, [*range(12)]) == list(sampler)


@pytest.mark.parametrize("make", [WithEpoch, weighted])
def test_a_process_that_begins_in_a_later_epoch_has_the_same_order(make):
    first, later = drawn(make()), drawn(make())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    orders = [first.samples(epoch, [*range(first.length)]) for epoch in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    np.random.rand(7)  # noqa: NPY002 - another state of the generators than the first process had
    assert later.samples(2, [*range(later.length)]) == orders[2]
    assert orders[0] != orders[1]


def test_batches_stay_whole_and_a_filler_is_one_of_them():
    batches = BatchSampler(RandomSampler(range(10), generator=torch.Generator().manual_seed(0)), 4, drop_last=False)
    order = drawn(batches, whole_batches=True)
    assert order.length == 3
    assert sorted(order.samples(0, [0, 1, 2])) == [*range(10)]
    assert len(order.samples(0, [0, 1], counts=False)) == 4


def test_rank_0s_order_is_that_of_all():
    order = DrawnOrder(weighted(), whole_batches=False, seed=5, agree=lambda _: [*range(12)])
    assert order.samples(0, [3, 7]) == [3, 7]


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [([4, 5], [4, 5, 4], "yields 2 samples: the first ones are trained again"),
     ([4, 5, 6, 7], [4, 5, 6], "yields 4 samples: the last ones are left out")],
)  # fmt: skip
def test_a_sampler_that_breaks_its_promise_is_said_once(caplog, found, expected, words):
    sampler = type("Sampler", (), {"__len__": lambda _: 3, "__iter__": lambda _: iter(found)})()
    order = drawn(sampler)
    assert [order.samples(epoch, [0, 1, 2]) for epoch in range(2)] == [expected] * 2
    assert [record.getMessage() for record in caplog.records] == [f"Sampler has a length of 3, but {words}."]


def test_a_sampler_without_samples_and_an_epoch_of_the_past_are_refused():
    empty = drawn(type("Sampler", (), {"__len__": lambda _: 3, "__iter__": lambda _: iter(())})())
    with pytest.raises(UsageError, match="yields nothing, but its length is 3"):
        empty.samples(0, [0])
    order = drawn(weighted())
    order.samples(1, [0])
    with pytest.raises(UsageError, match="has drawn epoch 1, and cannot draw epoch 0 again"):
        order.samples(0, [0])


def test_another_order_on_another_rank_is_said_once(caplog):
    """As of a sampler that divides the samples by itself, of which those of rank 0 alone would be trained."""
    order = DrawnOrder([4, 5, 6], whole_batches=False, seed=0, agree=lambda _: [1, 2, 3])
    assert [order.samples(epoch, [0, 2]) for epoch in range(2)] == [[1, 3]] * 2
    assert [record.getMessage().partition(", which")[0] for record in caplog.records] == [
        "list draws another order on this rank than on rank 0"
    ]


def test_what_was_drawn_before_all_ranks_could_agree_is_agreed_on_later(caplog):
    agreed = []
    order = DrawnOrder([[4, 5], [6]], whole_batches=True, seed=0, agree=lambda mine: agreed[-1] if agreed else mine)
    assert (order.samples(0, [0]), order.largest(0), order.some(3)) == ([4, 5], 2, [4, 5])
    agreed.append((-1, []))  # rank 0 has drawn nothing yet
    order.agree()
    assert not caplog.records
    agreed.append([[7, 8, 9], [6]])
    assert (order.largest(1), order.samples(1, [0, 1])) == (3, [7, 8, 9, 6])
