"""When newcomers may end a round of a program without a session, and when none may because it ends soon anyway."""

from __future__ import annotations

import pytest

from azureml_elastic.node.core.actions import AwaitSave, ForgetSaves, HoldWorkers
from azureml_elastic.node.core.boundary import Newcomers, SaveRule, ends_soon, seconds_left
from azureml_elastic.node.core.events import Pace

WAITING = frozenset({"node-2"})


def wait(newcomers: Newcomers, now: float, *, connected: bool = True) -> tuple[bool, list]:
    return newcomers.wait(WAITING, now, connected=connected)


def test_newcomers_wait_for_a_save_however_long_it_takes():
    newcomers = Newcomers(None, 2)
    assert wait(newcomers, 0.0) == (False, [AwaitSave(WAITING)])
    assert wait(newcomers, 1e6) == (False, [])
    newcomers.saved()
    assert wait(newcomers, 1e6 + 1) == (False, [HoldWorkers()])
    assert wait(newcomers, 1e6 + 2) == (False, []), "it saved at that moment, which must not be torn, perhaps for good"
    newcomers.saved()
    assert wait(newcomers, 1e6 + 3) == (False, [HoldWorkers()])


def test_another_node_is_waited_for_too():
    newcomers = Newcomers(None, 2)
    wait(newcomers, 0.0)
    assert newcomers.wait(WAITING | {"node-3"}, 1.0, connected=True) == (False, [AwaitSave(WAITING | {"node-3"})])


def test_a_save_from_before_the_wait_does_not_count():
    """The work since that save would be lost."""
    newcomers = Newcomers(None, 2)
    newcomers.saved()
    wait(newcomers, 0.0)
    assert wait(newcomers, 1.0) == (False, [])
    newcomers.saved()
    assert newcomers.nobody_waits(60.0) == [ForgetSaves()]
    assert newcomers.rest() == []
    assert wait(newcomers, 61.0) == (False, [AwaitSave(WAITING)])


def test_a_moment_without_a_waiting_node_does_not_begin_the_wait_anew():
    """A hub holds all nodes back while more of them come."""
    newcomers = Newcomers(None, 2)
    wait(newcomers, 0.0)
    assert newcomers.nobody_waits(1.0) == []
    newcomers.saved()
    assert wait(newcomers, 2.0) == (False, [HoldWorkers()])


@pytest.mark.parametrize(("world_size", "expected"), [(1, [HoldWorkers()]), (2, [])])
def test_several_workers_that_have_not_connected_may_prepare_data(world_size, expected):
    newcomers = Newcomers(None, world_size)
    wait(newcomers, 0.0, connected=False)
    newcomers.saved()
    assert wait(newcomers, 1.0, connected=False) == (False, expected)
    newcomers.saved()
    assert wait(newcomers, 2.0) == (False, [HoldWorkers()])


def test_a_job_may_limit_the_wait():
    newcomers = Newcomers(30.0, 2)
    assert newcomers.until is None
    assert not wait(newcomers, 0.0)[0]
    assert newcomers.until == 30.0
    assert not wait(newcomers, 29.0)[0]
    assert wait(newcomers, 30.0)[0]
    assert Newcomers(0.0, 2).wait(WAITING, 5.0, connected=False)[0]


def test_the_rest_of_the_run_is_estimated_from_its_pace():
    assert seconds_left(None, 20, 15, 100.0) is None
    pace = Pace(100.0, 10)
    assert seconds_left(pace, None, 15, 110.0) is None
    assert seconds_left(pace, 20, 10, 110.0) is None
    assert seconds_left(pace, 20, 15, 110.0) == 10.0
    assert seconds_left(pace, 20, 20, 110.0) == 0.0


@pytest.mark.parametrize(("seconds", "expected"), [(None, False), (1.0, False), (0.9, True), (0.0, True)])
def test_nobody_is_let_in_at_the_end_of_a_run(seconds, expected):
    assert ends_soon(seconds) == expected


def test_a_save_counts_once_an_optimizer_takes_another_step():
    rule = SaveRule()
    assert not rule.goes_on((3,)), "it has not saved"
    rule.saved((3,))
    assert not rule.goes_on((3,)), "it may have been the last save"
    assert rule.goes_on((4,))
    assert not rule.goes_on((4,)), "it may have left its training loop since"
    assert rule.goes_on((6,))


@pytest.mark.parametrize(
    ("at_save", "now"),
    [((8, 0), (8, 0)), ((8, 0), (8, 5)), ((0, 0), (1, 0)), ((), (1,))],
    ids=["exports", "calibrates with an optimizer of its own", "saved before its first step", "has not saved"],
)
def test_a_program_that_does_not_train_on_is_left_alone(at_save, now):
    rule = SaveRule()
    if at_save:
        rule.saved(at_save)
    assert not rule.goes_on(now)


def test_the_last_save_of_an_epoch_is_one_of_two_or_more():
    """EMA copies, the best one and the last one: each look finds the program where it was before."""
    rule = SaveRule()
    rule.saved((8,))
    rule.saved((8,))
    assert not rule.goes_on((8,))
    assert rule.goes_on((9,))


def test_a_program_without_an_optimizer_goes_on_where_it_saves_again():
    rule = SaveRule()
    rule.saved((0,))
    assert not rule.goes_on((0,))
    rule.saved((0,))
    assert rule.goes_on((0,))
    assert not rule.goes_on((0,))
    rule.saved((0,))
    assert rule.goes_on((0,))
    assert not rule.goes_on((1,)), "now its steps are seen"
