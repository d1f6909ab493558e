"""Snapshots on a node's disk: the next agent on the machine finds them, agents that run beside it do not."""

from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory, LocalSnapshots
from azureml_elastic.ipc.worker_messages import HoldShard, Memory, RetainSnapshot
from tests.support.shards import describe, memory_of


class Disk:
    """Agents on one machine, in turn or at the same time."""

    def __init__(self, folder):
        self.folder = folder
        self.agents = []

    def agent(self, node):
        self.agents.append(LocalSnapshots(self.folder, node))
        return self.agents[-1]

    def write(self, agent, folder, content, tail=b"", **changed):
        descriptor = memory_of(content + tail)
        agent.write([(descriptor, describe(folder, content, tail, **changed))])
        os.close(descriptor)
        agent._pool.submit(int).result()  # waits for the write


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "run")
    yield made
    for agent in made.agents:
        agent.close()


def contents(agent):
    return [(each.folder, Path(each.path).read_bytes()) for each in agent.describe()]


def test_the_next_agent_finds_the_newest_snapshot(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1" * 1000, b"tail")
    disk.write(first, "two", b"2" * 1000, b"tail")
    disk.write(first, "three", b"3" * 1000, b"tail")
    newest = [
        ("three", b"3" * 1000 + b"tail"),
        ("two", b"2" * 1000 + b"tail"),
    ]  # other nodes may not have written the third yet
    assert contents(first) == newest
    first.close()
    second = disk.agent("b")
    assert contents(second) == newest
    assert second.describe()[1] == replace(describe("two", b"2" * 1000, b"tail"), path=second.describe()[1].path)
    disk.write(second, "four", b"4")
    assert contents(second) == [("four", b"4")]
    assert not (disk.folder / "a").exists()


def test_of_waiting_snapshots_only_the_newest_is_written(disk):
    agent = disk.agent("a")
    go_on = threading.Event()
    agent._pool.submit(go_on.wait)
    for name in ("one", "two", "three"):
        descriptor = memory_of(name.encode())
        agent.write([(descriptor, describe(name, name.encode()))])
        os.close(descriptor)
    go_on.set()
    agent._pool.submit(int).result()
    assert contents(agent) == [("three", b"three")]


def test_the_successful_end_of_a_run_removes_snapshots_of_earlier_agents(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1")
    first.close()
    second = disk.agent("b")
    second.forget()
    assert not disk.folder.exists()


def test_the_snapshots_of_a_running_agent_are_not_offered_to_others(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1")
    second = disk.agent("b")
    assert contents(second) == []
    disk.write(second, "two", b"2")
    assert contents(first) == [("one", b"1")]


def test_the_folder_of_an_agent_that_was_started_again_is_its_own(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1")
    first.close()
    beside = disk.agent("b")
    again = disk.agent("a")
    disk.write(beside, "two", b"2")
    disk.write(again, "two", b"22")
    assert contents(again) == [("one", b"1"), ("two", b"22")]
    beside.forget()
    assert contents(again) == [("one", b"1"), ("two", b"22")]


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"xxh3": xxhash.xxh3_128_hexdigest(b"3" * 100)}, "take snapshots less often"), ({"size": 200}, "ends after 100")],
)
def test_a_snapshot_that_changes_or_is_torn_while_it_is_written_is_dropped(disk, caplog, changed, text):
    agent = disk.agent("a")
    disk.write(agent, "one", b"1" * 100)
    disk.write(agent, "two", b"2" * 100, **changed)
    assert contents(agent) == [("one", b"1" * 100)]
    assert text in caplog.text
    agent.close()
    description = next(disk.folder.glob("a/*/*.json"))
    description.write_bytes(description.read_bytes()[:-5])
    assert contents(disk.agent("b")) == []


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_failed_run_alone_leaves_its_snapshots(disk, succeeds):
    memory = AgentMemory(disk.agent("a"))
    descriptor = memory_of(b"1")
    memory.answer(HoldShard(os.getpid(), descriptor, describe("one", b"1")), 1, 0)
    memory.answer(RetainSnapshot("one"), 1, 0)
    os.close(descriptor)
    disk.agents[0]._pool.submit(int).result()
    assert len(memory.answer(Memory(), 1, 0).shards) == 2
    memory.close(forget=succeeds)
    assert disk.folder.exists() is not succeeds
    assert contents(disk.agent("b")) == ([] if succeeds else [("one", b"1")])


def test_a_folder_that_another_agent_has_locked_is_refused(disk):
    first = disk.agent("a")
    disk.write(first, "one", b"1")
    with pytest.raises(OSError, match="locked by another process"):
        LocalSnapshots(disk.folder, "a", lock_seconds=0.0)
    second = disk.agent("b")
    disk.write(second, "two", b"2")
    assert contents(first) == [("one", b"1")]


def test_an_agent_waits_for_another_that_tests_its_lock(disk):
    disk.agent("a").close()
    with (disk.folder / "a" / "owner").open() as probe:
        fcntl.flock(probe, fcntl.LOCK_EX)
        released = threading.Timer(0.1, fcntl.flock, (probe, fcntl.LOCK_UN))
        released.start()
        assert contents(disk.agent("a")) == []
        released.join()
