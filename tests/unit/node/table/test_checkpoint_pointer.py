"""The fence around the checkpoint's row: no older round ever writes again."""

from __future__ import annotations

import threading
import time

import pytest

from azureml_elastic.errors import Fenced, TableUnavailable
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY, CheckpointPointer

FIRST = {"directory": "step-1", "step": 1, "digest": "a"}
SECOND = {"directory": "step-2", "step": 2, "digest": "b"}
FIRST_WAIT = "azureml_elastic.node.table.checkpoint_pointer._FIRST_WAIT_SECONDS"


@pytest.fixture(autouse=True)
def short_wait(request, monkeypatch):
    """Wait for a table that answers, however slow it is; the one behind the gate does not."""
    if "gate" not in request.fixturenames:
        monkeypatch.setattr(FIRST_WAIT, 30.0)


def test_a_new_run_has_no_checkpoint(table):
    assert CheckpointPointer(table, 1, "x").take_over() is None


def test_the_next_round_restores_what_the_last_one_committed(table):
    first = CheckpointPointer(table, 1, "x")
    first.commit(FIRST)
    first.commit(SECOND)
    assert CheckpointPointer(table, 2, "y").take_over() == SECOND


def test_an_older_round_is_fenced_off_even_with_a_commit_in_flight(table):
    old, new = CheckpointPointer(table, 1, "x"), CheckpointPointer(table, 2, "y")
    old.commit(FIRST)
    assert new.take_over() == FIRST
    for _ in range(2):
        with pytest.raises(Fenced, match="Round 2"):
            old.commit(SECOND)
    assert new.take_over() == FIRST
    assert table.get(CHECKPOINT_KEY).value["pointer"] == FIRST


def test_a_round_that_was_never_first_cannot_take_over_a_newer_one(table):
    CheckpointPointer(table, 5, "y").take_over()
    with pytest.raises(Fenced):
        CheckpointPointer(table, 4, "x").take_over()


class Flaky:
    """A table whose next replace is carried out, but answered with a time-out."""

    def __init__(self, table):
        self._table = table
        self.lose_answer = False

    def __getattr__(self, name):
        return getattr(self._table, name)

    def replace(self, *arguments):
        etag = self._table.replace(*arguments)
        if self.lose_answer:
            self.lose_answer = False
            raise TableUnavailable("no answer in time")
        return etag


def test_a_commit_whose_answer_was_lost_can_be_repeated(table):
    flaky = Flaky(table)
    pointer = CheckpointPointer(flaky, 1, "x")
    pointer.commit(FIRST)
    flaky.lose_answer = True
    with pytest.raises(TableUnavailable):
        pointer.commit(SECOND)
    etag = table.get(CHECKPOINT_KEY).etag
    pointer.commit(SECOND)
    assert (table.get(CHECKPOINT_KEY).etag, committed(table)) == (etag, SECOND), "it is not written again"


class Gate:
    """A table whose replacements wait until the gate is open; it counts them."""

    def __init__(self, table):
        self._table = table
        self.open = threading.Event()
        self.open.set()
        self.replaced = 0

    def __getattr__(self, name):
        return getattr(self._table, name)

    def replace(self, *arguments):
        assert self.open.wait(30)
        self.replaced += 1
        return self._table.replace(*arguments)


@pytest.fixture
def gate(table):
    made = Gate(table)
    yield made
    made.open.set()


def committed(table):
    return table.get(CHECKPOINT_KEY).value["pointer"]


def test_a_table_that_does_not_answer_holds_up_training_once_and_briefly(gate, table, monkeypatch):
    pointer = CheckpointPointer(gate, 1, "x")
    pointer.take_over()
    gate.open.clear()
    began = time.monotonic()
    with pytest.raises(TableUnavailable, match=r"commit of step 1 for \d+\.\d s"):
        pointer.commit(FIRST)
    assert 0.9 < time.monotonic() - began < 10
    monkeypatch.setattr(FIRST_WAIT, 20.0)
    began = time.monotonic()
    with pytest.raises(TableUnavailable, match="step 2 was not begun"):
        pointer.commit(SECOND)
    assert time.monotonic() - began < 10
    gate.open.set()
    pointer.commit(SECOND)  # asked again, it waits for the first one
    assert committed(table) == SECOND
    assert gate.replaced == 2


def test_who_asks_again_for_the_same_checkpoint_waits_for_it_and_nothing_is_written_twice(gate, table):
    pointer = CheckpointPointer(gate, 1, "x")
    pointer.take_over()
    gate.open.clear()
    with pytest.raises(TableUnavailable):
        pointer.commit(FIRST)
    threading.Timer(0.3, gate.open.set).start()
    pointer.commit(FIRST)
    pointer.commit(FIRST)
    assert committed(table) == FIRST
    assert gate.replaced == 1


def test_the_last_commit_waits_for_one_that_is_still_under_way(gate, table):
    pointer = CheckpointPointer(gate, 1, "x")
    pointer.take_over()
    gate.open.clear()
    for wanted in (FIRST, SECOND):
        with pytest.raises(TableUnavailable):
            pointer.commit(wanted)
    threading.Timer(0.3, gate.open.set).start()
    pointer.commit(SECOND)
    assert committed(table) == SECOND


def test_a_commit_that_comes_late_is_fenced_like_any_other(gate, table):
    old = CheckpointPointer(gate, 1, "x")
    old.take_over()
    gate.open.clear()
    with pytest.raises(TableUnavailable):
        old.commit(FIRST)
    new = CheckpointPointer(table, 2, "y")
    assert new.take_over() is None
    gate.open.set()
    with pytest.raises(Fenced, match="Round 2"):
        old.commit(FIRST)
    assert committed(table) is None
