"""Saves for which newcomers of a program without a session wait, and what they are said to wait for."""

from __future__ import annotations

from datetime import timedelta

import pytest

from azureml_elastic.forks.state_lookups import Lookups
from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch, describe_wait

LOOKUPS = Lookups(frozenset({"/data/train.npz", "/data/a", "/out/last.pt"}), frozenset({"/out"}))
WAITING = frozenset({"node-2"})


class Saves:
    """A program that the test has train and save."""

    def __init__(self) -> None:
        self.saved = self.saves_now = self.asked = self.has_stopped = False
        self.steps = 7
        self.begun: list[tuple[int, ...]] = []
        self.lookups = Lookups()

    def begin(self, pids) -> None:
        self.saved = False
        self.begun.append(pids)

    def pause(self) -> None:
        pass

    def take_save(self) -> bool:
        saved, self.saved = self.saved, False
        return saved

    def read_steps(self) -> tuple[int, ...]:
        return (self.steps,)

    def ask_to_stop(self, *, ask: bool = True) -> None:
        self.asked, self.has_stopped = ask, self.has_stopped and ask

    def stop_workers(self) -> bool:
        return not self.saves_now

    def step(self) -> None:
        self.steps += bool(self.steps)
        self.has_stopped, self.asked = self.asked, False


class Leader:
    """The watch of rank 0's agent, with a clock of its own."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.now = 1000.0
        self.saves = Saves()
        self.watch = NewcomerWatch(self.saves, timeout, lambda: self.now)

    def sees_a_save(self, seconds: float = 0.0, *, steps: int = 0) -> bool:
        self.now += seconds
        self.saves.steps += steps
        return self.watch.take_saved()


@pytest.fixture
def leader():
    return Leader()


def test_nothing_is_looked_for_while_no_node_waits(leader):
    assert not leader.sees_a_save(60)
    assert not leader.saves.begun
    leader.watch.await_save(WAITING, (4711,))
    assert leader.saves.begun == [(4711,)]


def test_a_save_is_reported_with_each_step_after_it(leader):
    leader.watch.await_save(WAITING, (4711,))
    assert not leader.sees_a_save(3600, steps=100)
    leader.saves.saved = True
    assert not leader.sees_a_save(1, steps=1), "the save may be later than the step"
    assert not leader.sees_a_save(3600)
    assert leader.sees_a_save(1, steps=1)
    assert not leader.sees_a_save(1)
    assert leader.sees_a_save(1, steps=1)


def test_a_program_is_stopped_right_after_a_step_and_not_while_it_saves(leader):
    leader.watch.await_save(WAITING, (4711,))
    leader.saves.saved = True
    leader.sees_a_save()
    assert leader.sees_a_save(steps=1)
    assert not leader.watch.hold()
    assert not leader.watch.take_held(), "it may be between two steps, or behind the last one"
    assert not leader.sees_a_save(1)
    leader.saves.saves_now = True
    leader.saves.step()
    assert not leader.watch.take_held()
    assert not leader.saves.has_stopped, "it goes on"
    leader.saves.saves_now = False
    assert leader.sees_a_save(1, steps=1)
    leader.watch.hold()
    leader.saves.step()
    assert leader.watch.take_held()
    assert leader.saves.has_stopped
    assert not leader.watch.take_held()


def test_a_program_is_not_asked_to_stop_any_more_when_nobody_waits(leader):
    leader.watch.await_save(WAITING, (4711,))
    leader.watch.hold()
    assert leader.saves.asked
    leader.saves.step()
    leader.watch.rest()
    assert not leader.saves.asked
    assert not leader.saves.has_stopped


@pytest.mark.parametrize("saves_now", [False, True])
def test_a_program_without_steps_is_stopped_at_once_unless_it_saves(leader, saves_now):
    leader.watch.await_save(WAITING, (4711,))
    leader.saves.steps, leader.saves.saves_now = 0, saves_now
    assert leader.watch.hold() != saves_now
    assert not leader.saves.asked


def test_more_nodes_do_not_begin_the_look_anew_but_a_pause_does(leader):
    leader.watch.await_save(WAITING, (4711,))
    leader.watch.await_save(WAITING | {"node-3"}, (4711,))
    assert len(leader.saves.begun) == 1
    leader.saves.saved = True
    leader.sees_a_save()
    leader.watch.rest()
    assert not leader.sees_a_save(60, steps=1)
    leader.watch.await_save(WAITING, (4711,))
    assert not leader.sees_a_save(1, steps=1), "the work since the save before would be lost"
    assert len(leader.saves.begun) == 2


def test_what_they_wait_for_is_logged_when_it_is_known_and_when_it_changes(leader, caplog):
    caplog.set_level("INFO")
    leader.watch.await_save(WAITING, (4711,))
    leader.sees_a_save()
    assert not caplog.messages
    leader.sees_a_save(2)
    leader.sees_a_save(2)
    leader.saves.lookups = LOOKUPS
    leader.sees_a_save(2)
    leader.sees_a_save(2)
    assert caplog.messages == [describe_wait({"node-2"}, Lookups(), None), describe_wait({"node-2"}, LOOKUPS, None)]
    assert leader.watch.waits == caplog.messages[-1]
    leader.watch.rest()
    assert not leader.watch.waits


def test_the_reason_names_what_a_save_would_be():
    blind = describe_wait({"b", "a"}, Lookups(), None)
    assert blind.startswith("a, b: waiting")
    assert "has not looked for a saved state" in blind
    assert "would train all its steps again" in blind
    reads = describe_wait({"a"}, LOOKUPS, 90.0)
    assert "next save of a file that it has looked for at its start, once it trains on: /out/last.pt, " in reads, (
        "a state comes first"
    )
    assert reads.endswith("and 1 more. They wait for 90 s at most.")
