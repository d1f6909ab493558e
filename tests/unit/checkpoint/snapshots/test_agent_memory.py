"""The agent keeps memory of workers open after they have ended, and releases it when it is no longer needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.ipc.worker_messages import (
    Accepted,
    HandOver,
    HoldShard,
    Memory,
    RetainSnapshot,
)
from tests.support.shards import describe, memory_of


@pytest.fixture
def memory():
    made = AgentMemory()
    yield made
    made.close()


def hold(memory, content, message, number=1, rank=0):
    """Have memory held by a message of a worker, which is made of its descriptor."""
    descriptor = memory_of(content)
    assert memory.answer(message(descriptor), number, rank) == Accepted()
    os.close(descriptor)  # as at the end of the worker


def hold_shard(memory, folder, file, content):
    hold(memory, content, lambda descriptor: HoldShard(os.getpid(), descriptor, describe(folder, content, file=file)))


def contents(memory):
    held = memory.answer(Memory(), 1, 0).shards
    return {(each.folder, each.file): Path(each.path).read_bytes() for each in held}


def test_shards_outlive_their_worker_and_are_released_by_snapshot(memory):
    hold_shard(memory, "a", "rank-0", b"a0")
    hold_shard(memory, "a", "rank-1", b"a1")
    hold_shard(memory, "b", "rank-0", b"b0")
    assert contents(memory) == {("a", "rank-0"): b"a0", ("a", "rank-1"): b"a1", ("b", "rank-0"): b"b0"}
    paths = [each.path for each in memory.answer(Memory(), 1, 0).shards if each.folder == "a"]
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
    rank = 2 * number + part
    hold(memory, content, lambda descriptor: HandOver(os.getpid(), descriptor, step, part), number, rank)


def parts(memory):
    found = memory.answer(Memory(), 9, 0).states
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
    hold(memory, b"state", lambda descriptor: HandOver(os.getpid(), descriptor, 5), 3, 1)
    hold_shard(memory, "a", "rank-0", b"a0")
    memory.completed(3)
    (kept,) = memory.answer(Memory(), 4, 0).states
    assert (kept.step, kept.round, kept.rank) == (5, 3, 1)
    memory.completed(4)
    assert memory.answer(Memory(), 4, 0).states == []
    assert contents(memory) == {("a", "rank-0"): b"a0"}
