"""Data in shards: each sample once an epoch, over random histories of world sizes and crashes."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_elastic.config import FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train import Shards
from azureml_elastic.train.data.loader import LoaderContext
from azureml_elastic.train.data.position import Batching, Position
from azureml_elastic.train.data.sampling import Cursor
from azureml_elastic.train.data.shard_loader import ShardLoader, ShardSpec

SIZES = st.lists(st.integers(0, 12), min_size=9, max_size=30)
POLICIES = st.sampled_from(
    [
        FixedGlobalBatch(),
        FixedGlobalBatch(logical_workers=9),
        FixedGlobalBatch(logical_workers=9, reduce="exact"),
        FixedPerWorkerBatch(scaling="none", reference_world_size=2),
    ]
)
LIVES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8), st.integers(0, 4)), min_size=1, max_size=4)


def dataset(sizes):
    return Shards(list(enumerate(sizes)), lambda shard: ((shard[0] << 32 | at) for at in range(shard[1])))


class Ranks:
    """All ranks of a world as threads, of which one runs at a time, one step at a time.

    They share torch's global random numbers: two threads that read its state at once can wait for each other for ever,
    one for the generator and the other for the interpreter.
    """

    def __init__(self, sizes, spec, policy, cursor, world_size, options=None):
        self.total, self.world_size = torch.zeros(0), world_size
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.turn = threading.Lock()
        self.positions = [Position(WorkerIdentity(rank, 0, world_size, 0)) for rank in range(world_size)]
        self.loaders = []
        for position in self.positions:
            position.in_epochs = True
            stream = position.add("train", spec)
            stream.cursor = cursor
            options = {"collate_fn": list, **(options or {})}
            context = LoaderContext(position, torch.device("cpu"), Batching(policy), options=options)
            self.loaders.append(ShardLoader(dataset(sizes), stream, context, self.exchange))

    def exchange(self, numbers):
        if self.wait() == 0:
            self.total = torch.zeros_like(numbers)
        self.wait()
        self.total += numbers
        self.wait()
        numbers.copy_(self.total)
        self.wait()

    def wait(self):
        self.turn.release()
        try:
            return self.barrier.wait()
        finally:
            self.turn.acquire()

    def train(self, steps):
        """Return the windows of an epoch's next steps: by rank, micro-batches as (planned, batch)."""
        found = [[] for _ in range(self.world_size)]
        with ThreadPoolExecutor(self.world_size) as threads:
            ranks = [threads.submit(self._train, rank, steps, found[rank]) for rank in range(self.world_size)]
            for rank in ranks:
                rank.result()
        assert len({len(steps_of_rank) for steps_of_rank in found}) == 1
        return list(zip(*found, strict=True))

    def _train(self, rank, steps, found):
        try:
            with self.turn:
                self._train_on(rank, steps, found)
        except BaseException:
            self.barrier.abort()
            raise

    def _train_on(self, rank, steps, found):
        position, step = self.positions[rank], []
        for batch in self.loaders[rank]:
            (stream,) = position.opened
            if not stream.open.window.count:  # the epoch was resumed at its end
                position.drop()
                continue
            step.append((stream.open, batch))
            if position.accumulating:
                continue
            position.commit()
            found.append(step)
            step = []
            if len(found) == steps:
                return


def trained(sizes, spec, policy, lives):
    """Return the committed windows of each epoch, and the last cursor."""
    epochs, checkpoint = {0: []}, (Cursor(), {0: 0})
    for world_size, steps, lost in lives:
        cursor, counts = checkpoint
        epochs = {epoch: epochs[epoch][:count] for epoch, count in counts.items()}
        history, left = [checkpoint], steps
        while left:
            windows = Ranks(sizes, spec, policy, cursor, world_size).train(left)
            for window in windows:
                assert len({micro.window.after for rank in window for micro, _ in rank}) == 1
                assert sum(rank[0][0].window.count for rank in window) == world_size * window[0][0][0].window.count
                weights = sum(micro.weight for rank in window for micro, _ in rank)
                assert weights == pytest.approx(world_size)
                samples = [each for rank in window for micro, batch in rank for each in batch if micro.samples]
                assert len(samples) == window[0][0][0].window.count
                assert sorted(samples) == sorted(each for rank in window for each in rank[0][0].window.ids)
                epochs[cursor.epoch].append(samples)
                cursor = window[0][0][0].window.after
                history.append((cursor, {epoch: len(each) for epoch, each in epochs.items()}))
            left -= len(windows)
            if left:  # the epoch is over
                cursor = Cursor(cursor.epoch + 1)
                epochs[cursor.epoch] = []
                left = left if sum(sizes) else 0
                history.append((cursor, {epoch: len(each) for epoch, each in epochs.items()}))
        checkpoint = history[max(0, len(history) - 1 - lost)]
    cursor, counts = checkpoint
    return {epoch: epochs[epoch][:count] for epoch, count in counts.items()}, cursor


def everything(sizes):
    return Counter(shard << 32 | at for shard, size in enumerate(sizes) for at in range(size))


@given(sizes=SIZES, policy=POLICIES, lives=LIVES, size=st.integers(12, 40), shuffle=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_history_trains_each_sample_once(sizes, policy, lives, size, shuffle):
    size += size % 2
    spec = ShardSpec.make(
        len(sizes),
        getattr(policy, "logical_workers", None),
        smallest_window=Batching(policy).window_size(size, 1),
        global_batch_size=size,
        seed=1,
        shuffle=shuffle,
        drop_last=False,
    )
    epochs, cursor = trained(sizes, spec, policy, lives)
    for epoch, windows in epochs.items():
        seen = Counter(sample for window in windows for sample in window)
        if epoch < cursor.epoch:
            assert seen == everything(sizes)
        else:
            assert seen <= everything(sizes)
            assert set(seen.values()) <= {1}


def test_a_world_of_one_reads_all_streams():
    policy = FixedPerWorkerBatch(scaling="none", reference_world_size=2)
    sizes, order = [0] * 8 + [11] + [0] * 13, {"global_batch_size": 16, "seed": 1, "shuffle": False}
    smallest = Batching(policy).window_size(16, 1)
    spec = ShardSpec.make(len(sizes), None, smallest_window=smallest, drop_last=False, **order)
    epochs, _ = trained(sizes, spec, policy, [(1, 12, 0)])
    windows = epochs[0]
    assert spec.streams <= smallest == 8
    assert Counter(sample for window in windows for sample in window) == everything(sizes)


@given(sizes=SIZES, lives=LIVES)
@settings(max_examples=20, deadline=None)
def test_windows_do_not_depend_on_the_world(sizes, lives):
    policy = FixedGlobalBatch(logical_workers=9)
    spec = ShardSpec.make(len(sizes), 9, global_batch_size=18, seed=1, shuffle=True, drop_last=False)
    epochs, _ = trained(sizes, spec, policy, lives)
    alone, _ = trained(sizes, spec, policy, [(1, sum(steps for _, steps, _ in lives), 0)])
    for epoch, windows in epochs.items():
        assert windows == alone.get(epoch, [])[: len(windows)]  # without any sample, each life has an epoch of its own


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("policy", [FixedGlobalBatch(), FixedGlobalBatch(logical_workers=6)])
def test_reading_in_processes_changes_nothing(policy, processes):
    sizes = [5, 0, 7, 3, 9, 1, 4, 4]
    spec = ShardSpec.make(len(sizes), 6, global_batch_size=12, seed=1, shuffle=True, drop_last=False)
    alone = Ranks(sizes, spec, policy, Cursor(), 1).train(100)
    found = Ranks(sizes, spec, policy, Cursor(), 1, {"num_workers": processes}).train(100)
    windows = [[sorted(micro.window.ids) for micro, _ in rank[-1:]] for (rank,) in found]
    assert windows == [[sorted(micro.window.ids) for micro, _ in rank[-1:]] for (rank,) in alone]
    if policy.logical_workers is None:
        assert max(len(rank) for (rank,) in found) == processes


def test_incomplete_windows_are_dropped():
    sizes = [4] * 6
    spec = ShardSpec.make(6, 6, global_batch_size=18, seed=1, shuffle=True, drop_last=True)
    windows = Ranks(sizes, spec, FixedGlobalBatch(), Cursor(), 2).train(100)
    assert [window[0][0][0].window.count for window in windows] == [18]


def test_stream_counts_suit_most_world_sizes():
    streams = [
        ShardSpec.make(shards, None, global_batch_size=64, seed=0, shuffle=True, drop_last=False).streams
        for shards in (1, 5, 13, 30, 1000)
    ]
    assert streams == [1, 4, 12, 24, 60]


def test_what_cannot_be_read_in_shards_is_refused():
    with pytest.raises(UsageError, match="logical_workers=12 is above the limit of 5"):
        ShardSpec.make(5, 12, global_batch_size=64, seed=0, shuffle=True, drop_last=False)
    with pytest.raises(UsageError, match="num_shards=0"):
        ShardSpec.make(0, None, global_batch_size=64, seed=0, shuffle=True, drop_last=False)
    spec = ShardSpec.make(2, None, global_batch_size=64, seed=0, shuffle=True, drop_last=False)
    position = Position(WorkerIdentity(0, 0, 3, 0))
    context = LoaderContext(position, torch.device("cpu"), Batching(FixedGlobalBatch()))
    loader = ShardLoader(dataset([1, 2]), position.add("train", spec), context, lambda _: None)
    with pytest.raises(UsageError, match="2 streams, fewer than the 3 ranks"):
        next(iter(loader))
    with pytest.raises(UsageError, match="'train' has no steps_per_epoch: its dataset is in shards"):
        _ = loader.steps_per_epoch
    with pytest.raises(TypeError, match="'train' has no length"):
        len(loader)
    with pytest.raises(UsageError, match="2 items cannot be read as 3 shards"):
        dataset([1, 2]).shard(num_shards=3, index=0)
