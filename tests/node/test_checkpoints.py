"""The fence around the checkpoint's row: no older round ever writes again."""

from __future__ import annotations

import pytest

from azureml_elastic.errors import Fenced, TableUnavailable
from azureml_elastic.node.checkpoints import CHECKPOINT_KEY, CheckpointPointer
from azureml_elastic.node.table import open_table
from azureml_elastic.spec import TableRendezvous

FIRST = {"directory": "step-1", "step": 1, "digest": "a"}
SECOND = {"directory": "step-2", "step": 2, "digest": "b"}


@pytest.fixture
def table(tmp_path):
    opened = open_table(TableRendezvous(endpoint=str(tmp_path / "t.sqlite")), "run", {})
    yield opened
    opened.close()


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
    pointer.commit(SECOND)
    assert table.get(CHECKPOINT_KEY).value["pointer"] == SECOND
