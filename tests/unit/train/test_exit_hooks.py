"""The end of a session: whether all ranks have arrived before the first one leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from azureml_elastic.train.session.exit_hooks import all_arrive


@pytest.fixture
def store():
    """The default group's store, over which threads meet as if they were ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


def test_ranks_that_arrive_in_time_all_return_true(store):
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: all_arrive("end", 3, 60.0), range(3))) == [True] * 3
        assert list(pool.map(lambda _: all_arrive("another end", 3, 60.0), range(3))) == [True] * 3


def test_a_rank_that_gave_up_is_not_counted_by_later_ones(store):
    assert not all_arrive("end", 2, 0.0)
    assert store.add("end", 0) == 0
    assert not all_arrive("end", 2, 0.0)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: all_arrive("end", 2, 60.0), range(2))) == [True] * 2


class LastMoment:
    """A store in which the other rank arrives at the moment at which the first one gives up."""

    def __init__(self, store):
        self._store = store

    def add(self, key, amount):
        if amount < 0:
            self._store.add(key, 1)
        return self._store.add(key, amount)


def test_a_rank_that_gives_up_while_the_last_one_arrives_is_counted(store, monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: LastMoment(store))
    assert all_arrive("end", 2, 0.0)
    assert store.add("end", 0) == 2


def test_one_rank_is_complete_and_several_without_a_group_are_not():
    assert all_arrive("end", 1, 0.0)
    assert not all_arrive("end", 2, 0.0)
