"""What rank 0's node writes to the heartbeat's row, and what follows where another version is there."""

from __future__ import annotations

import pytest

from azureml_elastic.node.core.table_heartbeat import HeartbeatRow, HeartbeatWriter, Overtaken

ME = "me"
EARLIER = HeartbeatRow("v7", 1, 40, "another")


def test_the_row_of_an_earlier_round_is_replaced_and_that_of_a_later_one_is_not():
    assert HeartbeatWriter(2, ME, EARLIER).version == "v7"
    assert HeartbeatWriter(2, ME, None).version is None
    assert HeartbeatWriter(2, ME, HeartbeatRow("v8", 3, 1)).version is None


def test_the_round_is_compared_after_the_first_write_alone():
    writer = HeartbeatWriter(2, ME, EARLIER)
    assert writer.beat() == {"round": 2, "beats": 1, "by": ME}
    assert writer.written("v8")
    assert writer.beat()["beats"] == 2
    assert not writer.written("v9")
    assert writer.version == "v9"


def test_a_newer_round_ends_the_writes():
    assert HeartbeatWriter(2, ME, None).overtaken(HeartbeatRow("v9", 3, 1)) == Overtaken(given_up=True)


@pytest.mark.parametrize(
    ("row", "look"),
    [
        (HeartbeatRow("v9", 2, 2, ME), False),  # an answer was lost
        (HeartbeatRow("v9", 2, 1, ""), True),  # another node asks for it
        (HeartbeatRow("v9", 2, 0, ME), True),  # the row went back
        (EARLIER, True),
        (None, True),
    ],
    ids=["own write", "asked", "older", "of an earlier round", "gone"],
)
def test_what_another_version_means(row, look):
    writer = HeartbeatWriter(2, ME, EARLIER)
    writer.beat()
    writer.written("v8")
    writer.beat()
    assert writer.overtaken(row) == Overtaken(look=look, again=True)
    assert writer.version == (None if row is None else row.version)
    assert not writer.overtaken(row).again  # only once at once
    assert writer.overtaken(row).again


def test_before_the_first_write_nothing_is_known_to_be_lost():
    writer = HeartbeatWriter(2, ME, None)
    writer.beat()
    assert writer.overtaken(HeartbeatRow("v9", 2, 1, ME)) == Overtaken(again=True)


def test_after_a_call_without_an_answer_the_next_conflict_is_repeated_at_once():
    writer = HeartbeatWriter(2, ME, None)
    assert writer.overtaken(None).again
    writer.unanswered()
    assert writer.overtaken(None).again
