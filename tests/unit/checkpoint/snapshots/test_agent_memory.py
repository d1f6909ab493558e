"""Memory of workers that the agent holds on to: there when the worker is gone, and no longer than it is wanted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory


@pytest.fixture
def memories():
    kept = AgentMemory()
    yield kept
    kept.close()


def memory_with(content):
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def hold_shard(memories, folder, file, content):
    descriptor = memory_with(content)
    message = {
        "op": "hold_shard",
        "pid": os.getpid(),
        "fd": descriptor,
        "description": {"folder": folder, "file": file},
    }
    assert memories.answer(message, 1, 0) == {"ok": True}
    os.close(descriptor)  # the worker is gone


def contents(memories):
    held = memories.answer({"op": "held_shards"}, 1, 0)["held"]
    found = {}
    for each in held:
        found[each["folder"], each["file"]] = Path(each["path"]).read_bytes()
    return found


def test_shares_outlive_their_worker_and_are_let_go_of_by_copy(memories):
    hold_shard(memories, "a", "rank-0", b"a0")
    hold_shard(memories, "a", "rank-1", b"a1")
    hold_shard(memories, "b", "rank-0", b"b0")
    assert contents(memories) == {("a", "rank-0"): b"a0", ("a", "rank-1"): b"a1", ("b", "rank-0"): b"b0"}
    paths = [each["path"] for each in memories.answer({"op": "held_shards"}, 1, 0)["held"] if each["folder"] == "a"]
    assert memories.answer({"op": "retain_snapshot", "folder": "b"}, 1, 0) is None
    assert contents(memories) == {("b", "rank-0"): b"b0"}
    assert not any(Path(path).exists() for path in paths)


def test_a_share_takes_the_place_of_the_same_one(memories):
    hold_shard(memories, "a", "rank-0", b"old")
    hold_shard(memories, "a", "rank-0", b"new")
    assert contents(memories) == {("a", "rank-0"): b"new"}


def test_memory_that_is_gone_is_refused(memories):
    message = {"op": "hold_shard", "pid": os.getpid(), "fd": 987654, "description": {"folder": "a", "file": "b"}}
    reply = memories.answer(message, 1, 0)
    assert reply["error"] == "unavailable"
    assert "cannot be opened" in reply["message"]
    assert contents(memories) == {}


def test_a_state_handed_over_goes_with_the_first_step_of_a_later_round(memories):
    descriptor = memory_with(b"state")
    message = {"op": "handover", "pid": os.getpid(), "fd": descriptor, "step": 5}
    assert memories.answer(message, 3, 1) == {"ok": True}
    os.close(descriptor)
    hold_shard(memories, "a", "rank-0", b"a0")
    memories.completed(3)
    kept = memories.answer({"op": "memory"}, 4, 0)["memory"]
    assert (kept["step"], kept["round"], kept["rank"]) == (5, 3, 1)
    memories.completed(4)
    assert memories.answer({"op": "memory"}, 4, 0) == {"memory": None}
    assert contents(memories) == {("a", "rank-0"): b"a0"}
