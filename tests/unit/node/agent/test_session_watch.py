"""What is said and recorded of a program that trains without a session."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from azureml_elastic.ledger.events import TrainsWithoutSession
from azureml_elastic.node.agent.without_session import SessionWatch, describe_restarts


class Node:
    """Rank 0's node with one worker, and its watch with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.folder = folder
        self.recorded: list[type] = []
        self.watch = SessionWatch(folder, self.recorded.append, lambda: self.now)

    def steps(self, count: int) -> None:
        (self.folder / "steps-7").write_bytes(struct.pack("=64Qd??", count, *[0] * 66))

    def look(self, seconds: float = 0.0, *, connecting: bool = False, opened: bool = False) -> list[type]:
        self.now += seconds
        self.watch.look([7], connecting=connecting, opened=opened)
        return self.recorded


@pytest.fixture
def node(tmp_path, caplog):
    caplog.set_level("INFO")
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("opened", "seconds"), [(False, 1.0), (True, 2.0)], ids=["no session", "one that takes no part"]
)
def test_the_first_step_shows_that_a_program_trains_without_a_session(node, caplog, opened, seconds):
    assert node.look(opened=opened) == node.look(1.0, opened=opened) == []
    node.steps(1)
    assert node.look(opened=opened) == node.look(seconds - 0.1, opened=opened) == [], "its report may be under way"
    assert node.look(0.1, opened=opened) == [TrainsWithoutSession]
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", describe_restarts(()))]
    node.steps(2)
    assert node.look(60.0, connecting=True) == [TrainsWithoutSession]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("connecting", "seconds"), [(True, 3.0), (False, 30.0)])
def test_a_program_without_an_optimizer_has_time_to_open_a_session(node, caplog, connecting, seconds):
    assert node.look(connecting=connecting) == []
    assert node.look(seconds - 0.1, connecting=connecting) == []
    assert node.look(0.1, connecting=connecting, opened=True) == [], "it has opened one"
    node.now -= 0.1
    assert node.look(0.1, connecting=connecting) == [TrainsWithoutSession]
    assert not caplog.records, "it may only be reading its data"


def test_what_is_looked_for_is_named(node, caplog):
    (node.folder / "lookups-7").write_bytes(b"/out/last.pt\0/data/\0")
    node.steps(1)
    node.look()
    node.look(1.0)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "It has looked for /out/last.pt, /data/." in record.message
    assert "all that it has not saved and reads back is trained again" in record.message


def test_the_consequence_is_said():
    assert "started again from its first line, and trains all its steps again" in describe_restarts(())


def test_nothing_is_said_once_a_session_has_begun(node, caplog):
    """In a further round its processes may have trained already, and have not yet reported that they begin."""
    node.watch.session_has_begun()
    node.steps(9)
    assert node.look(60.0, connecting=True) == node.look(60.0) == []
    assert not caplog.records
