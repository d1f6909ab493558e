"""When newcomers may end a round of a program without a session, and what they are said to wait for."""

from __future__ import annotations

from datetime import timedelta

import pytest

from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch
from azureml_elastic.node.agent.newcomers import describe_wait
from azureml_elastic.node.preload.state_lookups import Lookups

LOOKUPS = Lookups(frozenset({"/data/train.npz", "/data/a", "/out/last.pt"}), frozenset({"/out"}))


class Saves:
    """A program that the test has save."""

    def __init__(self) -> None:
        self.saved = self.saves_now = False
        self.watching = False
        self.begun: list[tuple[int, ...]] = []
        self.lookups = Lookups()

    def begin(self, pids) -> None:
        self.saved = False
        self.watching = True
        self.begun.append(pids)

    def pause(self) -> None:
        self.watching = False

    def stop_workers(self) -> bool:
        return not self.saves_now

    def close(self) -> None:
        pass


class Leader:
    """The watch of rank 0's agent, with a clock of its own."""

    def __init__(self, timeout: timedelta | None = None, world_size: int = 2) -> None:
        self.now = 1000.0
        self.connected = True
        self.saves = Saves()
        self.watch = NewcomerWatch(self.saves, timeout, lambda: self.now)
        self.watch.begin(world_size, (4711,))

    def lets_in(self, seconds: float = 0.0) -> bool:
        """Let time pass with a node waiting."""
        self.now += seconds
        return self.watch.may_end_round({"node-2"}, connected=self.connected)


def test_newcomers_wait_for_a_save_however_long_it_takes():
    leader = Leader()
    assert not leader.lets_in()
    assert not leader.lets_in(1e6)
    leader.saves.saved = True
    assert leader.lets_in()
    assert leader.saves.begun == [(4711,)]


def test_a_save_at_this_moment_is_not_torn():
    leader = Leader()
    leader.lets_in()
    leader.saves.saved = leader.saves.saves_now = True
    assert not leader.lets_in(10)
    leader.saves.saves_now = False
    assert leader.lets_in()


def test_nothing_is_looked_for_while_no_node_waits():
    leader = Leader()
    assert not leader.saves.begun
    leader.lets_in()
    leader.watch.rest()
    assert not leader.saves.watching
    assert not leader.watch.waits


def test_a_save_from_before_the_wait_does_not_count():
    """The work since that save would be lost."""
    leader = Leader()
    leader.lets_in()
    leader.saves.saved = True
    leader.now += 60
    leader.watch.nobody_waits()  # the node has gone again
    assert not leader.lets_in()
    assert len(leader.saves.begun) == 2


def test_a_moment_without_a_waiting_node_does_not_begin_the_wait_anew():
    """A hub holds all nodes back while more of them come."""
    leader = Leader()
    leader.lets_in()
    leader.now += 1
    leader.watch.nobody_waits()
    leader.saves.saved = True
    assert leader.lets_in()


@pytest.mark.parametrize(("world_size", "expected"), [(1, True), (2, False)])
def test_several_workers_that_have_not_connected_may_prepare_data(world_size, expected):
    leader = Leader(world_size=world_size)
    leader.connected = False
    leader.lets_in()
    leader.saves.saved = True
    assert leader.lets_in() == expected
    leader.connected = True
    assert leader.lets_in()


def test_a_job_may_limit_the_wait():
    leader = Leader(timedelta(seconds=30))
    assert not leader.lets_in()
    assert not leader.lets_in(29)
    assert leader.lets_in(1)
    assert Leader(timedelta(0)).lets_in()


def test_what_they_wait_for_is_logged_when_it_is_known_and_when_it_changes(caplog):
    caplog.set_level("INFO")
    leader = Leader()
    leader.lets_in()
    assert not caplog.messages
    leader.lets_in(2)
    leader.lets_in(2)
    leader.saves.lookups = LOOKUPS
    leader.lets_in(2)
    leader.lets_in(2)
    assert caplog.messages == [describe_wait({"node-2"}, Lookups(), None), describe_wait({"node-2"}, LOOKUPS, None)]
    assert leader.watch.waits == caplog.messages[-1]
    leader.watch.begin(3, (4712,))
    assert not leader.watch.waits


def test_the_reason_names_what_a_save_would_be():
    blind = describe_wait({"b", "a"}, Lookups(), None)
    assert blind.startswith("a, b: waiting")
    assert "has not looked for a saved state" in blind
    assert "would train all its steps again" in blind
    reads = describe_wait({"a"}, LOOKUPS, 90.0)
    assert "next save of a file that it has looked for at its start: /out/last.pt, " in reads, "a state comes first"
    assert reads.endswith("and 1 more. They wait for 90 s at most.")
