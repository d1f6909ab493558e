"""When newcomers may end a round of a program without a session, and when none may because it ends soon anyway."""

from __future__ import annotations

import pytest

from azureml_elastic.node.core.actions import AwaitSave, ForgetSaves, HoldWorkers
from azureml_elastic.node.core.boundary import Newcomers, ends_soon, seconds_left
from azureml_elastic.node.core.events import Pace

WAITING = frozenset({"node-2"})


def wait(newcomers: Newcomers, now: float, *more: str, connected: bool = True) -> tuple[bool, list]:
    return newcomers.wait(WAITING.union(more), now, saved=newcomers.take_saved(), connected=connected)


def test_newcomers_wait_for_a_save_however_long_it_takes():
    newcomers = Newcomers(None, 2)
    assert wait(newcomers, 0.0) == (False, [AwaitSave(WAITING)])
    assert wait(newcomers, 1e6) == (False, [])
    newcomers.saved()
    assert wait(newcomers, 1e6 + 1) == (True, [HoldWorkers()])
    assert wait(newcomers, 1e6 + 2) == (False, []), "it waited at that moment alone"


def test_another_node_is_waited_for_too():
    newcomers = Newcomers(None, 2)
    wait(newcomers, 0.0)
    assert newcomers.wait(WAITING | {"node-3"}, 1.0, saved=False, connected=True) == (
        False,
        [AwaitSave(WAITING | {"node-3"})],
    )


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
    assert wait(newcomers, 2.0) == (True, [HoldWorkers()])


@pytest.mark.parametrize(("world_size", "expected"), [(1, [HoldWorkers()]), (2, [])])
def test_several_workers_that_have_not_connected_may_prepare_data(world_size, expected):
    newcomers = Newcomers(None, world_size)
    wait(newcomers, 0.0, connected=False)
    newcomers.saved()
    assert wait(newcomers, 1.0, connected=False) == (bool(expected), expected)
    newcomers.saved()
    assert wait(newcomers, 2.0) == (True, [HoldWorkers()])


def test_a_job_may_limit_the_wait():
    newcomers = Newcomers(30.0, 2)
    assert newcomers.until is None
    assert not wait(newcomers, 0.0)[0]
    assert newcomers.until == 30.0
    assert not wait(newcomers, 29.0)[0]
    assert wait(newcomers, 30.0)[0]
    assert wait(Newcomers(0.0, 2), 5.0, connected=False)[0]


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
