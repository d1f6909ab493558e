"""Each sample once an epoch, over random histories of world sizes and crashes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_elastic.config import FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.loader import LoaderContext
from azureml_elastic.train.data.map_loader import MapLoader, WindowLoader
from azureml_elastic.train.data.position import Batching, Position
from azureml_elastic.train.data.sampling import Cursor, DataSpec, order, share, weight

SPECS = st.builds(
    DataSpec,
    length=st.integers(1, 200),
    global_batch_size=st.integers(1, 64),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    drop_last=st.just(False),
) | st.integers(1, 40).flatmap(
    lambda size: st.builds(
        DataSpec,
        length=st.integers(size, 200),
        global_batch_size=st.just(size),
        seed=st.integers(0, 99),
        shuffle=st.booleans(),
        drop_last=st.booleans(),
    )
)
# The rounds of a run: world size, number of steps, and number of those that the crash at its end loses.
WHOLE = Batching(FixedGlobalBatch())
LIVES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 25), st.integers(0, 5)), min_size=1, max_size=8)


def rank_loader(spec, cursor, rank, world_size, batching=WHOLE, kind=MapLoader):
    position = Position(WorkerIdentity(rank=rank, local_rank=0, world_size=world_size, round=0))
    stream = position.add("train", spec)
    stream.cursor = cursor
    return kind(range(spec.length), stream, LoaderContext(position, torch.device("cpu"), batching))


def windows(loader):
    return [micro.window for micro, _ in loader.planned() if micro.last]


def undisturbed(spec, epoch):
    indices = order(spec, epoch)(np.arange(spec.length)).tolist()
    return [indices[start : start + spec.global_batch_size] for start in range(0, spec.usable, spec.global_batch_size)]


def test_without_epochs_a_pass_that_leaves_less_than_a_window_is_over():
    spec = DataSpec(length=100, global_batch_size=10, seed=0, shuffle=False, drop_last=True)
    loader = rank_loader(spec, Cursor(), 0, 4, Batching(FixedPerWorkerBatch(reference_world_size=1, scaling="linear")))
    epochs = []
    for _ in range(3):
        for _ in loader:
            epochs.append(loader._state.cursor.epoch)
            loader._position.commit()
    assert epochs == [0, 0, 1, 1, 2, 2], "40 samples each, of 100"


@given(spec=SPECS, world_size=st.integers(1, 9), batches=st.integers(1, 4), data=st.data())
def test_a_repeated_batch_has_as_many_samples_as_the_rank_would_train(spec, world_size, batches, data):
    rank = data.draw(st.integers(0, world_size - 1))
    batching = Batching(FixedGlobalBatch(), micro_batches=batches, equal_counts=True)
    loader = rank_loader(spec, Cursor(), rank, world_size, batching, kind=WindowLoader)
    trained = [len(ids) for _, ids in loader.planned()]
    windows = len(loader) // loader.micro_batches
    assert [size for window in range(windows) for size in loader.sizes(0, window)] == trained
    assert [len(loader.filler(size)) for size in trained] == trained


@given(spec=SPECS, lives=LIVES)
def test_any_history_trains_the_windows_of_an_undisturbed_run(spec, lives):
    trained = []  # the committed windows of all epochs
    checkpoint = (0, Cursor())  # number of windows in it, and the cursor
    for world_size, steps, lost in lives:
        del trained[checkpoint[0] :]
        cursor = checkpoint[1]
        history = [checkpoint]
        while len(history) <= steps:
            if not spec.window(cursor.consumed, spec.global_batch_size):
                cursor = Cursor(cursor.epoch + 1)
            ranks = [windows(rank_loader(spec, cursor, rank, world_size)) for rank in range(world_size)]
            for together in zip(*ranks, strict=True):
                trained.append([sample for window in together for sample in window.ids])
                (cursor,) = {window.after for window in together}
                history.append((len(trained), cursor))
                if len(history) > steps:
                    break
        checkpoint = history[max(0, len(history) - 1 - lost)]
    expected = []
    epoch = 0
    while len(expected) < len(trained):
        expected += undisturbed(spec, epoch)
        epoch += 1
    assert trained == expected[: len(trained)]


BATCHINGS = st.builds(
    Batching,
    st.builds(FixedGlobalBatch, logical_workers=st.none() | st.integers(1, 24))
    | st.builds(FixedPerWorkerBatch, scaling=st.just("none")),
    st.none() | st.integers(1, 9),
)


@given(spec=SPECS, batching=BATCHINGS, lives=LIVES)
@settings(max_examples=200)
def test_any_history_trains_each_sample_once_an_epoch(spec, batching, lives):
    trained, history = [], [(0, Cursor())]  # committed samples with their epochs, and their number at each step
    for world_size, steps, lost in lives:
        count, cursor = history[max(0, len(history) - 1 - lost)]
        del trained[count:]
        history = [(count, cursor)]
        while len(history) <= steps:
            ranks = [
                list(rank_loader(spec, cursor, rank, world_size, batching).planned()) for rank in range(world_size)
            ]
            for micros in zip(*map(by_window, ranks), strict=True):
                (window,) = {(each[0][0].window.count, each[0][0].window.after) for each in micros}
                assert sum(micro.weight for each in micros for micro, _ in each) == pytest.approx(world_size)
                samples = [sample for each in micros for micro, ids in each if micro.samples for sample in ids]
                assert samples == [sample for each in micros for sample in each[0][0].window.ids]
                assert len(samples) == window[0]
                assert max(micro.samples for each in micros for micro, _ in each) <= (
                    batching.micro_batch_size or 10**9
                )
                trained += [(cursor.epoch, sample) for sample in samples]
                cursor = window[1]
                history.append((len(trained), cursor))
                if len(history) > steps:
                    break
            else:
                cursor = Cursor(cursor.epoch + 1)
                history.append((len(trained), cursor))
    assert len(set(trained)) == len(trained)
    for epoch in range(cursor.epoch):
        dropped = spec.length - sum(1 for found, _ in trained if found == epoch)
        assert dropped == 0 or (spec.drop_last and dropped < max(life[0] for life in lives) * spec.global_batch_size)


def by_window(planned):
    """Group a rank's micro-batches."""
    windows = []
    for micro, ids in planned:
        if micro.index == 0:
            windows.append([])
        windows[-1].append((micro, ids))
        assert micro.index == len(windows[-1]) - 1
    assert all(each[-1][0].last and not any(micro.last for micro, _ in each[:-1]) for each in windows)
    return windows


@given(spec=SPECS, epoch=st.integers(0, 5))
def test_an_epoch_holds_each_sample_once(spec, epoch):
    samples = [sample for window in undisturbed(spec, epoch) for sample in window]
    assert len(samples) == len(set(samples)) == spec.usable
    assert set(samples) <= set(range(spec.length))
    assert len(undisturbed(spec, epoch)) == spec.windows
    if not spec.drop_last:
        assert len(samples) == spec.length


def test_epochs_and_seeds_have_their_own_order():
    orders = {
        tuple(
            order(DataSpec(50, global_batch_size=8, seed=seed, shuffle=True, drop_last=False), epoch)(
                np.arange(50)
            ).tolist()
        )
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@given(count=st.integers(0, 300), world_size=st.integers(1, 40))
def test_shares_partition_the_window_evenly(count, world_size):
    shares = [share(count, world_size, rank) for rank in range(world_size)]
    assert [index for part in shares for index in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(count=st.integers(1, 300), world_size=st.integers(1, 40))
def test_weights_add_up_to_the_mean_over_the_window(count, world_size):
    own = [len(share(count, world_size, rank)) for rank in range(world_size)]
    # the mean over ranks of weight * (sum / own) must give each sample the factor 1 / count
    for size in own:
        if size:
            assert weight(size, count, world_size) / size / world_size == pytest.approx(1 / count)
        else:
            assert weight(size, count, world_size) == 0.0


def test_a_rank_without_a_sample_stands_in_with_weight_zero():
    spec = DataSpec(2, global_batch_size=8, seed=0, shuffle=True, drop_last=False)
    planned = [next(rank_loader(spec, Cursor(), rank, 4).planned()) for rank in range(4)]
    assert [micro.samples for micro, _ in planned] == [1, 1, 0, 0]
    assert [len(ids) for _, ids in planned] == [1, 1, 2, 2]
    assert [len(micro.window.ids) for micro, _ in planned] == [1, 1, 0, 0]
    assert [micro.weight for micro, _ in planned] == [2.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"length": 49}, "length was 50 and is 49"),
        ({"global_batch_size": 9}, "global_batch_size was 8 and is 9"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"drop_last": True}, "drop_last was False and is True"),
    ],
)
def test_changed_data_are_refused(change, text):
    fields = {"length": 50, "global_batch_size": 8, "seed": 0, "shuffle": True, "drop_last": False}
    saved = json.loads(json.dumps(DataSpec(**fields).to_json()))
    DataSpec(**fields).require_same(saved)
    with pytest.raises(UsageError, match=text):
        DataSpec(**{**fields, **change}).require_same(saved)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"length": 0}, "empty"),
        ({"global_batch_size": 0}, "below the limit of 1"),
        ({"length": 7, "drop_last": True}, "drops them all"),
    ],
)
def test_impossible_data_are_refused(fields, text):
    good = {"length": 50, "global_batch_size": 8, "seed": 0, "shuffle": True, "drop_last": False}
    with pytest.raises(UsageError, match=text):
        DataSpec(**{**good, **fields})


@given(spec=SPECS, world_size=st.integers(1, 7), most=st.integers(1, 30), workers=st.none() | st.integers(1, 12))
def test_equal_counts_give_all_ranks_the_same_micro_batches(spec, world_size, most, workers):
    batching = Batching(FixedGlobalBatch(logical_workers=workers), most, equal_counts=True)
    ranks = [rank_loader(spec, Cursor(), rank, world_size, batching) for rank in range(world_size)]
    plans = [list(loader.planned()) for loader in ranks]
    expected = ranks[0].micro_batches * spec.windows
    assert {len(plan) for plan in plans} == {len(loader) for loader in ranks} == {expected}
    assert {(micro.index, micro.last) for plan in plans for micro, _ in plan} == {
        (index, index == ranks[0].micro_batches - 1) for index in range(ranks[0].micro_batches)
    }
    assert all(
        len(ids) <= max(most, 2) and (len(ids) == micro.samples or not micro.samples)
        for plan in plans
        for micro, ids in plan
    )
    trained = sorted(index for plan in plans for micro, ids in plan if micro.samples for index in ids)
    assert trained == sorted(order(spec, 0)(np.arange(spec.usable)).tolist())
    recorded = sorted(index for plan in plans for micro, _ in plan if micro.last for index in micro.window.ids)
    assert recorded == trained
    total = sum(micro.weight for plan in plans for micro, _ in plan)
    assert total == pytest.approx(spec.windows * world_size)
