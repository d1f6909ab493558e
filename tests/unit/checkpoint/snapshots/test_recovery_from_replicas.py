"""Recovery of snapshots from the memory of the remaining nodes."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.format.catalogue import newest_whole
from azureml_elastic.checkpoint.format.manifest import FolderName, Manifest
from azureml_elastic.checkpoint.snapshots.replication import (
    ReplicaShard,
    choose_replicas,
    partners,
    recover_from_replicas,
)
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.errors import CheckpointError, Fenced, TableUnavailable
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.message import HeldShard
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from tests.support.shards import describe, memory_of
from tests.support.train import damages

IDENTITY = WorkerIdentity(0, 0, 1, 9)
POLICY = CheckpointPolicy(keep=2, keep_every_steps=1000)


class HoldingAgent(StandaloneAgent):
    """An agent that holds shards in memory."""

    def __init__(self, storage):
        super().__init__(storage, WorkerIdentity(1, 0, 2, 0))
        self.storage = storage
        self.held = []
        self.stack = contextlib.ExitStack()
        self.refusal = None

    def put(self, step, rank, world_size=2, content=None, broken=None):
        folder = str(FolderName(step, 3, f"{step:08x}"))
        content = content or random.Random(f"{step}.{rank}").randbytes(1000)
        manifest = Manifest(folder, step, 3, world_size, None, {}, {"model": step}, None, "2")
        tail = manifest.to_bytes() if rank == 0 else b""
        descriptor = memory_of((broken or content) + tail)
        self.stack.callback(os.close, descriptor)
        shard = describe(folder, content, tail, rank, step=step, world_size=world_size)
        self.held.append(HeldShard(**asdict(shard), path=f"/proc/{os.getpid()}/fd/{descriptor}"))
        return content

    def held_shards(self):
        return self.held

    def commit(self, reference, stall_seconds):
        if self.refusal is not None:
            raise self.refusal
        super().commit(reference, stall_seconds)


@pytest.fixture
def agent(tmp_path):
    made = HoldingAgent(LocalStorage(tmp_path / "c"))
    with made.stack:
        yield made


def run(agent, committed=None):
    control = damages.Alone()
    return recover_from_replicas(agent.storage, control, agent, IDENTITY, committed, POLICY, pauses=(0.0,))


def test_the_newest_complete_snapshot_is_committed(agent):
    agent.put(5, 0)
    agent.put(5, 1)
    first, second = agent.put(7, 0), agent.put(7, 1)
    agent.put(9, 0)  # the node with the other shard is lost
    reference = run(agent)
    assert reference.step == 7
    assert agent.pointer() == reference
    manifest = newest_whole(agent.storage)
    assert manifest.reference == reference
    assert (manifest.round, manifest.world_size, manifest.state) == (9, 2, {"model": 7})
    assert agent.storage.read(manifest.directory, "rank-00000.safetensors") == first
    assert agent.storage.read(manifest.directory, "rank-00001.safetensors") == second


def test_snapshots_older_than_the_committed_checkpoint_are_ignored(agent):
    for rank in range(2):
        agent.put(7, rank)
    committed = run(agent)
    assert run(agent, committed) is None
    for rank in range(2):
        agent.put(8, rank)
    newest = run(agent, committed)
    assert newest.step == 8
    assert Manifest.read(agent.storage, newest.directory).parent == committed


def test_a_torn_shard_is_replaced_by_its_replica(agent):
    agent.put(7, 0)
    content = agent.put(7, 1, broken=bytes(1000))
    agent.put(7, 1)
    reference = run(agent)
    assert reference.step == 7
    assert agent.storage.read(reference.directory, "rank-00001.safetensors") == content


def test_without_an_intact_replica_the_previous_snapshot_is_committed(agent):
    for rank in range(2):
        agent.put(5, rank)
    agent.put(7, 0)
    agent.put(7, 1, broken=bytes(1000))
    assert run(agent).step == 5


def test_a_snapshot_with_a_torn_manifest_is_skipped(agent):
    for rank in range(2):
        agent.put(5, rank)
        agent.put(7, rank)
    descriptor = os.open(agent.held[1].path, os.O_RDWR)
    os.pwrite(descriptor, b"x", 1005)
    os.close(descriptor)
    assert run(agent).step == 5


def test_a_snapshot_whose_memory_was_released_is_skipped(agent):
    for rank in range(2):
        agent.put(5, rank)
        agent.put(7, rank)
    agent.held[1] = replace(agent.held[1], path="/proc/self/fd/987654")
    assert run(agent).step == 5


def test_a_refused_commit_raises(agent):
    for rank in range(2):
        agent.put(5, rank)
    agent.refusal = Fenced("a newer round has taken over")
    with pytest.raises(Fenced, match="newer round"):
        run(agent)
    agent.refusal = TableUnavailable("away")
    with pytest.raises(CheckpointError, match="could not be committed: away"):
        run(agent)
    agent.refusal = None
    assert run(agent).step == 5


def test_old_checkpoints_are_removed_and_some_kept_for_good(agent):
    committed = None
    for step in (990, 1003, 1010, 1020):
        agent.held.clear()
        for rank in range(2):
            agent.put(step, rank)
        committed = run(agent, committed)
    steps = {FolderName.parse(name).step: FolderName.parse(name).kept for name in agent.storage.folders()}
    assert steps == {1003: True, 1010: False, 1020: False}


def test_a_snapshot_that_cannot_be_written_leaves_the_committed_checkpoint(agent):
    for rank in range(2):
        agent.put(5, rank)
    committed = run(agent)
    for rank in range(2):
        agent.put(7, rank)

    class Full(LocalStorage):
        def write(self, folder, name, blocks):
            if name == "rank-00001.safetensors":
                raise OSError("no space left")
            return super().write(folder, name, blocks)

    agent.storage = Full(agent.storage.root)
    assert run(agent, committed) is None
    assert agent.storage.folders() == [committed.directory]


def held(holder, step, rank, world_size, folder="a"):
    return ReplicaShard(folder, f"rank-{rank}", step, world_size, rank, 10, 0, "", "", holder)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2)).map(
            lambda each: held(each[0], each[1], each[2], 1 + each[1] % 3, f"step-{each[1]}")
        ),
        max_size=20,
    ),
    st.integers(-1, 4),
)
def test_the_chosen_snapshot_is_the_newest_complete_one(every, newer_than):
    every = [each for each in every if each.rank < each.world_size]
    whole = {
        step
        for step in range(1, 5)
        if {each.rank for each in every if each.step == step} == set(range(1 + step % 3)) and step > newer_than
    }
    chosen = choose_replicas(every, newer_than)
    if chosen is None:
        assert not whole
    else:
        assert {each.step for each in chosen} == {max(whole)}
        assert [each.rank for each in chosen] == list(range(chosen[0].world_size))
        assert set(chosen) <= set(every)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_a_replica_is_on_another_node(sizes):
    nodes = [first for first, size in zip(_firsts(sizes), sizes, strict=True) for _ in range(size)]
    found = partners(nodes)
    for rank, partner in enumerate(found):
        if len(sizes) == 1:
            assert partner is None
        else:
            assert nodes[partner] != nodes[rank]
    if len(sizes) > 1 and len(set(sizes)) == 1:
        assert sorted(found) == list(range(len(nodes)))  # each rank holds one replica


def _firsts(sizes):
    return [sum(sizes[:at]) for at in range(len(sizes))]
