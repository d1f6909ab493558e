"""Recovery of snapshots from the memory of the remaining nodes."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.format.catalogue import newest_whole
from azureml_elastic.checkpoint.format.manifest import FolderName, Manifest
from azureml_elastic.checkpoint.snapshots.replication import partners
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.errors import CheckpointError, Fenced, TableUnavailable
from azureml_elastic.ipc.agent_interface import HandedOverState, HeldCopies, WorkerIdentity
from tests.support.shards import RefusingAgent, describe, memory_of
from tests.support.train import damages

IDENTITY = WorkerIdentity(0, 0, 1, 9)
POLICY = CheckpointPolicy(keep=2, keep_every_steps=1000)


class HoldingAgent(RefusingAgent):
    """An agent that holds shards and states in memory."""

    holds_snapshots = True

    def __init__(self, storage):
        super().__init__(storage)
        self.storage = storage
        self.shards, self.states = [], []
        self.stack = contextlib.ExitStack()

    def put(self, step, rank, world_size=2, content=None, broken=None):
        folder = str(FolderName(step, 3, f"{step:08x}"))
        content = content or random.Random(f"{step}.{rank}").randbytes(1000)
        manifest = Manifest(folder, step, 3, world_size, None, {}, {"model": step}, None, "2")
        tail = manifest.to_bytes() if rank == 0 else b""
        descriptor = memory_of((broken or content) + tail)
        self.stack.callback(os.close, descriptor)
        shard = describe(folder, content, tail, rank, step=step, world_size=world_size)
        self.shards.append(replace(shard, path=f"/proc/{os.getpid()}/fd/{descriptor}"))
        return content

    def put_all(self, step):
        for rank in range(2):
            self.put(step, rank)

    def held(self):
        return HeldCopies(self.states, self.shards)


@pytest.fixture
def agent(tmp_path):
    made = HoldingAgent(LocalStorage(tmp_path / "c"))
    with made.stack:
        yield made


class Groups:
    """The process groups of a lone rank."""

    identity, control, device = IDENTITY, damages.Alone(), torch.device("cpu")


def find(agent):
    return Checkpoints(POLICY, agent.storage, Groups(), agent, pauses=(0.0,)).find()


def run(agent):
    """Return the checkpoint that is restored."""
    return find(agent).manifest.reference


def test_the_newest_complete_snapshot_is_committed(agent):
    agent.put_all(5)
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
    agent.put_all(7)
    committed = run(agent)
    assert run(agent) == committed
    agent.put_all(8)
    newest = run(agent)
    assert newest.step == 8
    assert Manifest.read(agent.storage, newest.directory).parent == committed


def test_a_torn_shard_is_replaced_by_its_replica(agent):
    agent.put(7, 0)
    content = agent.put(7, 1, broken=bytes(1000))
    agent.put(7, 1)
    reference = run(agent)
    assert reference.step == 7
    assert agent.storage.read(reference.directory, "rank-00001.safetensors") == content


@pytest.mark.parametrize("damage", ["torn shard", "torn manifest", "released memory"])
def test_without_an_intact_replica_the_previous_snapshot_is_committed(agent, damage):
    agent.put_all(5)
    agent.put(7, 0)
    agent.put(7, 1, broken=bytes(1000) if damage == "torn shard" else None)
    if damage == "torn manifest":
        descriptor = os.open(agent.shards[2].path, os.O_RDWR)
        os.pwrite(descriptor, b"x", 1005)
        os.close(descriptor)
    elif damage == "released memory":
        agent.shards[2] = replace(agent.shards[2], path="/proc/self/fd/987654")
    assert run(agent).step == 5


def test_parts_in_memory_are_next_where_a_further_snapshot_is_damaged(agent):
    agent.put(7, 0)
    agent.put(7, 1, broken=bytes(1000))
    content = Snapshot(5, {}, {"at": 5}, tensors=local_chunks({"model/w": torch.ones(3)}))
    agent.states.append(HandedOverState(f"/proc/{os.getpid()}/fd/{content.to_memory()}", 5, 8, 0, part=0))
    assert find(agent).content.data == {"at": 5}
    agent.put(7, 1)
    assert run(agent).step == 7


@pytest.mark.parametrize(
    ("refusal", "error", "text"),
    [
        (Fenced("a newer round has taken over"), Fenced, "newer round"),
        (TableUnavailable("away"), CheckpointError, "could not be committed: away"),
    ],
)
def test_a_refused_commit_raises(agent, refusal, error, text):
    for rank in range(2):
        agent.put(5, rank)
    agent.refusal = refusal
    with pytest.raises(error, match=text):
        run(agent)
    agent.refusal = None
    assert run(agent).step == 5


def test_old_checkpoints_are_removed_and_some_kept_for_good(agent):
    for step in (990, 1003, 1010, 1020):
        agent.shards.clear()
        agent.put_all(step)
        run(agent)
    steps = {FolderName.parse(name).step: FolderName.parse(name).kept for name in agent.storage.folders()}
    assert steps == {1003: True, 1010: False, 1020: False}


def test_a_snapshot_that_cannot_be_written_leaves_the_committed_checkpoint(agent):
    agent.put_all(5)
    committed = run(agent)
    agent.put_all(7)

    class Full(LocalStorage):
        def write(self, folder, name, blocks):
            if name == "rank-00001.safetensors":
                raise OSError("no space left")
            return super().write(folder, name, blocks)

    agent.storage = Full(agent.storage.root)
    assert run(agent) == committed
    assert agent.storage.folders() == [committed.directory]


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
