"""Copies of the state on a node's disk: for the next agent on the machine, and for nobody else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import xxhash

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.checkpoint.snapshots.local_snapshots import LocalSnapshots


def described(folder, content, tail=b"", rank=0):
    sums = {"size": len(content), "tail": len(tail), "xxh3": xxhash.xxh3_128_hexdigest(content)}
    return {"folder": folder, "file": f"rank-{rank:05}.safetensors", "step": 1, "world_size": 1, "rank": rank, **sums}


def memory_with(content):
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


class Disk:
    """Agents on one machine, one after the other or at once."""

    def __init__(self, folder):
        self.folder = folder
        self.agents = []

    def agent(self, node):
        self.agents.append(LocalSnapshots(self.folder, node))
        return self.agents[-1]

    def write(self, agent, folder, content, tail=b"", **changed):
        descriptor = memory_with(content + tail)
        agent.write([(descriptor, {**described(folder, content, tail), "path": "memory", **changed})])
        os.close(descriptor)
        agent._pool.submit(int).result()  # when that is done


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "run")
    yield made
    for agent in made.agents:
        agent.close()


def contents(agent):
    return [(each["folder"], Path(each["path"]).read_bytes()) for each in agent.describe()]


def test_the_newest_copy_is_there_for_the_next_agent(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1" * 1000, b"tail")
    disk.write(first, "two", b"2" * 1000, b"tail")
    disk.write(first, "three", b"3" * 1000, b"tail")
    newest = [("three", b"3" * 1000 + b"tail"), ("two", b"2" * 1000 + b"tail")]  # others may not have three yet
    assert contents(first) == newest
    first.close()
    second = disk.agent("b")
    assert contents(second) == newest
    assert second.describe()[1] == {**described("two", b"2" * 1000, b"tail"), "path": second.describe()[1]["path"]}
    disk.write(second, "four", b"4")
    assert contents(second) == [("four", b"4")]
    assert not (disk.folder / "a").exists()


def test_of_copies_that_wait_only_the_newest_is_written(disk):
    agent = disk.agent("a")
    go_on = threading.Event()
    agent._pool.submit(go_on.wait)
    for name in ("one", "two", "three"):
        descriptor = memory_with(name.encode())
        agent.write([(descriptor, described(name, name.encode()))])
        os.close(descriptor)
    go_on.set()
    agent._pool.submit(int).result()
    assert contents(agent) == [("three", b"three")]


def test_what_another_agent_has_left_goes_with_a_run_that_has_ended_well(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1")
    first.close()
    second = disk.agent("b")
    second.forget()
    assert not disk.folder.exists()


def test_a_living_agents_copies_are_its_own(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1")
    second = disk.agent("b")
    assert contents(second) == []
    disk.write(second, "two", b"2")
    assert contents(first) == [("one", b"1")]


def test_a_copy_that_changes_under_way_is_not_taken(disk, caplog):
    agent = disk.agent("a")
    disk.write(agent, "one", b"1" * 100)
    disk.write(agent, "two", b"2" * 100, xxh3=xxhash.xxh3_128_hexdigest(b"3" * 100))
    assert contents(agent) == [("one", b"1" * 100)]
    assert "take copies less often" in caplog.text


def test_a_torn_copy_is_not_offered(disk):
    agent = disk.agent("a")
    disk.write(agent, "one", b"1" * 100)
    disk.write(agent, "two", b"2" * 100, size=200)
    assert contents(agent) == [("one", b"1" * 100)]
    agent.close()
    description = next(disk.folder.glob("a/*/*.json"))
    description.write_bytes(description.read_bytes()[:-5])
    assert contents(disk.agent("b")) == []


def test_nothing_is_left_of_a_run_that_has_ended_well(disk):
    memories = AgentMemory(disk.agent("a"))
    descriptor = memory_with(b"1")
    message = {"op": "hold_shard", "pid": os.getpid(), "fd": descriptor, "description": described("one", b"1")}
    memories.answer(message, 1, 0)
    memories.answer({"op": "retain_snapshot", "folder": "one"}, 1, 0)
    os.close(descriptor)
    assert len(memories.answer({"op": "held_shards"}, 1, 0)["held"]) >= 1
    memories.close(forget=True)
    assert not disk.folder.exists()


def test_a_run_that_has_failed_leaves_it(disk):
    memories = AgentMemory(disk.agent("a"))
    descriptor = memory_with(b"1")
    memories.answer(
        {"op": "hold_shard", "pid": os.getpid(), "fd": descriptor, "description": described("one", b"1")}, 1, 0
    )
    memories.answer({"op": "retain_snapshot", "folder": "one"}, 1, 0)
    disk.agents[0]._pool.submit(int).result()
    os.close(descriptor)
    memories.close(forget=False)
    assert contents(disk.agent("b")) == [("one", b"1")]
