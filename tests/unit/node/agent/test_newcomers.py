"""Saves for which newcomers of a program without a session wait, and what they are said to wait for."""

from __future__ import annotations

import struct
from datetime import timedelta
from pathlib import Path

import pytest

from azureml_elastic.node.agent.without_session import NewcomerWatch, describe_wait

LOOKUPS = frozenset({"/data/train.npz", "/data/a", "/out/last.pt", "/out/"})
WAITING = frozenset({"node-2"})


class Leader:
    """The watch of rank 0's agent with a clock of its own, and the file of a worker that the test writes."""

    def __init__(self, folder: Path, timeout: timedelta | None = None) -> None:
        self.now = 1000.0
        self.watch = NewcomerWatch(folder, timeout, lambda: self.now)
        self.folder = folder
        self.file = folder / "steps-4711"
        self.begins()

    def begins(self) -> None:
        self.file.write_bytes(struct.pack("=64Qd??", *[0] * 67))

    @property
    def asked(self) -> bool:
        return bool(self.file.read_bytes()[-2])

    def waits_in_step(self) -> None:
        """Have the worker take the step after a save; it goes on where it is not asked any more."""
        with self.file.open("r+b") as file:
            file.seek(-1, 2)
            file.write(bytes([self.asked]))

    def looks_for(self, *paths: str) -> None:
        (self.folder / "lookups-4711").write_bytes(b"".join(path.encode() + b"\0" for path in paths))

    def sees_a_save(self, seconds: float = 0.0) -> bool:
        self.now += seconds
        return self.watch.take_saved()


@pytest.fixture
def leader(tmp_path):
    return Leader(tmp_path)


def test_a_worker_is_asked_while_a_node_waits(leader):
    assert not leader.sees_a_save(60)
    assert not leader.asked
    leader.watch.await_save(WAITING, (4711, 4712))
    assert not leader.sees_a_save()
    assert leader.asked
    leader.watch.rest()
    assert not leader.asked
    assert not leader.sees_a_save(60)
    assert not leader.asked


def test_a_worker_that_begins_later_is_asked_too(leader):
    leader.file.unlink()
    leader.watch.await_save(WAITING, (4711,))
    leader.sees_a_save()
    leader.begins()
    leader.sees_a_save()
    assert leader.asked


def test_a_worker_that_waits_is_kept_until_it_is_ended(leader):
    leader.watch.await_save(WAITING, (4711,))
    leader.sees_a_save()
    leader.waits_in_step()
    assert leader.sees_a_save()
    leader.watch.hold()
    assert not leader.sees_a_save()
    leader.watch.rest()
    assert leader.asked, "it goes on once it has got SIGTERM"


def test_a_worker_that_is_not_kept_goes_on_at_once_and_waits_after_its_next_save(leader):
    """Its node has its reasons: the workers have not connected, or the run is about to end."""
    leader.watch.await_save(WAITING, (4711,))
    leader.sees_a_save()
    leader.waits_in_step()
    assert leader.sees_a_save()
    assert not leader.sees_a_save()
    assert not leader.asked
    leader.waits_in_step()
    assert not leader.sees_a_save()
    assert leader.asked
    leader.waits_in_step()
    assert leader.sees_a_save()


def test_more_nodes_do_not_begin_the_wait_anew(leader, caplog):
    caplog.set_level("INFO")
    leader.watch.await_save(WAITING, (4711,))
    leader.now += 1
    leader.watch.await_save(WAITING | {"node-3"}, (4711,))
    leader.sees_a_save()
    assert caplog.messages == [describe_wait({"node-2", "node-3"}, (), None)]


def test_what_they_wait_for_is_logged_when_it_is_known_and_when_it_changes(leader, caplog):
    caplog.set_level("INFO")
    leader.watch.await_save(WAITING, (4711,))
    leader.sees_a_save()
    assert not caplog.messages
    leader.sees_a_save(2)
    leader.sees_a_save(2)
    leader.looks_for(*LOOKUPS)
    leader.sees_a_save(2)
    leader.sees_a_save(2)
    assert caplog.messages == [describe_wait({"node-2"}, (), None), describe_wait({"node-2"}, LOOKUPS, None)]
    assert leader.watch.waits == caplog.messages[-1]
    leader.watch.rest()
    assert not leader.watch.waits


def test_the_reason_names_what_a_save_would_be():
    blind = describe_wait({"b", "a"}, (), None)
    assert blind.startswith("a, b: waiting")
    assert "has not looked for a saved state" in blind
    assert "would train all its steps again" in blind
    reads = describe_wait({"a"}, LOOKUPS, 90.0)
    assert "next save of a file that it has looked for at its start, once it trains on: /out/last.pt, " in reads, (
        "a state comes first"
    )
    assert reads.endswith("and 1 more. They wait for 90 s at most.")
