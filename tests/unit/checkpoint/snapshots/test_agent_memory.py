"""The agent keeps memory of workers open after they have ended, and releases it when it is no longer needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.ipc.worker_messages import (
    Accepted,
    HandOver,
    HeldShards,
    HoldShard,
    Memory,
    MemoryReply,
    RetainSnapshot,
)
from tests.support.shards import describe, memory_of


@pytest.fixture
def memory():
    made = AgentMemory()
    yield made
    made.close()


def hold_shard(memory, folder, file, content):
    descriptor = memory_of(content)
    message = HoldShard(os.getpid(), descriptor, describe(folder, content, file=file))
    assert memory.answer(message, 1, 0) == Accepted()
    os.close(descriptor)  # as at the end of the worker


def contents(memory):
    held = memory.answer(HeldShards(), 1, 0).held
    found = {}
    for each in held:
        found[each.folder, each.file] = Path(each.path).read_bytes()
    return found


def test_shards_outlive_their_worker_and_are_released_by_snapshot(memory):
    hold_shard(memory, "a", "rank-0", b"a0")
    hold_shard(memory, "a", "rank-1", b"a1")
    hold_shard(memory, "b", "rank-0", b"b0")
    assert contents(memory) == {("a", "rank-0"): b"a0", ("a", "rank-1"): b"a1", ("b", "rank-0"): b"b0"}
    paths = [each.path for each in memory.answer(HeldShards(), 1, 0).held if each.folder == "a"]
    assert memory.answer(RetainSnapshot("b"), 1, 0) is None
    assert contents(memory) == {("b", "rank-0"): b"b0"}
    assert not any(Path(path).exists() for path in paths)


def test_a_shard_replaces_an_earlier_one_of_the_same_name(memory):
    hold_shard(memory, "a", "rank-0", b"old")
    hold_shard(memory, "a", "rank-0", b"new")
    assert contents(memory) == {("a", "rank-0"): b"new"}


def test_released_memory_is_refused(memory):
    message = HoldShard(os.getpid(), 987654, describe("a", b""))
    reply = memory.answer(message, 1, 0)
    assert reply.error == "unavailable"
    assert "cannot be opened" in reply.message
    assert contents(memory) == {}


def hand_part_over(memory, content, *, part, step, number):
    descriptor = memory_of(content)
    assert memory.answer(HandOver(os.getpid(), descriptor, step, part), number, 2 * number + part) == Accepted()
    os.close(descriptor)


def parts(memory):
    found = memory.answer(Memory(), 9, 0).held
    return {each.part: (each.round, each.step, Path(each.path).read_bytes()) for each in found}


def test_a_part_of_an_earlier_round_stays_until_its_worker_replaces_it(memory):
    hand_part_over(memory, b"a", part=0, step=5, number=3)
    hand_part_over(memory, b"b", part=1, step=5, number=3)
    hand_part_over(memory, b"c", part=1, step=5, number=4)  # the other worker of round 4 had not restored yet
    assert parts(memory) == {0: (3, 5, b"a"), 1: (4, 5, b"c")}
    assert memory.take_state() is None, "a part alone is no checkpoint"
    memory.completed(4)
    assert parts(memory) == {1: (4, 5, b"c")}
    memory.completed(5)
    assert parts(memory) == {}


def test_a_handed_over_state_is_released_at_the_first_step_of_a_later_round(memory):
    descriptor = memory_of(b"state")
    message = HandOver(os.getpid(), descriptor, 5)
    assert memory.answer(message, 3, 1) == Accepted()
    os.close(descriptor)
    hold_shard(memory, "a", "rank-0", b"a0")
    memory.completed(3)
    (kept,) = memory.answer(Memory(), 4, 0).held
    assert (kept.step, kept.round, kept.rank) == (5, 3, 1)
    memory.completed(4)
    assert memory.answer(Memory(), 4, 0) == MemoryReply()
    assert contents(memory) == {("a", "rank-0"): b"a0"}
