"""When newcomers may end a round of a program without a session."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch
from azureml_elastic.node.agent.newcomers import LONGEST_SECONDS, RoundProgress, may_end_round, minimum_seconds

MINIMUM = 300.0
IMPORTING = RoundProgress(seconds=20.0, connected_seconds=None, saved=False, world_size=2)

durations = st.floats(0, 1e5)
progresses = st.builds(
    RoundProgress,
    seconds=durations,
    connected_seconds=st.none() | durations,
    saved=st.booleans(),
    world_size=st.integers(1, 64),
)


def test_workers_that_have_not_connected_are_not_stopped():
    assert not may_end_round(IMPORTING, MINIMUM, 0)
    assert not may_end_round(replace(IMPORTING, seconds=LONGEST_SECONDS - 1), 0.0, 0)


def test_a_save_admits_newcomers_at_once():
    assert may_end_round(replace(IMPORTING, connected_seconds=1.0, saved=True), MINIMUM, 9)


def test_files_of_workers_that_have_not_connected_may_be_prepared_data():
    prepared = replace(IMPORTING, saved=True)
    assert not may_end_round(prepared, MINIMUM, 0)
    assert may_end_round(replace(prepared, seconds=300.0), MINIMUM, 0)  # they may connect by other means
    run = Watch()
    run.begin()
    run.outputs.saved = True
    assert not run.pass_(1)
    run.connected = True
    assert not run.pass_(1)
    run.outputs.saved = True
    assert run.pass_(1)


def test_the_minimum_counts_from_the_connection_and_doubles():
    late = replace(IMPORTING, seconds=5000.0)
    assert not may_end_round(replace(late, connected_seconds=299.0), MINIMUM, 0)
    assert may_end_round(replace(late, connected_seconds=300.0), MINIMUM, 0)
    assert not may_end_round(replace(late, connected_seconds=599.0), MINIMUM, 1)
    assert may_end_round(replace(late, connected_seconds=600.0), MINIMUM, 1)


def test_a_single_worker_need_not_connect():
    alone = replace(IMPORTING, seconds=300.0, world_size=1)
    assert may_end_round(alone, MINIMUM, 0)
    assert not may_end_round(alone, MINIMUM, 1)


@given(progresses, durations, st.integers(0, 10**6))
def test_newcomers_wait_no_longer_than_the_bound(progress, configured, unsaved):
    limit = max(configured, LONGEST_SECONDS)
    assert minimum_seconds(configured, unsaved) <= limit
    connected = progress.seconds if progress.connected_seconds is None else progress.connected_seconds
    if min(progress.seconds, connected) >= limit:
        assert may_end_round(progress, configured, unsaved)


@given(progresses, durations, st.integers(0, 100))
def test_more_time_never_revokes_and_more_unsaved_rounds_never_allow(progress, configured, unsaved):
    if not may_end_round(progress, configured, unsaved):
        assert not may_end_round(progress, configured, unsaved + 1)
        return
    connected = None if progress.connected_seconds is None else progress.connected_seconds + 1
    assert may_end_round(
        replace(progress, seconds=progress.seconds + 1, connected_seconds=connected), configured, unsaved
    )


class Outputs:
    """Output folders in which the test saves."""

    def __init__(self) -> None:
        self.saved = False
        self.begun = 0

    def begin(self) -> None:
        self.saved = False
        self.begun += 1

    def pause(self) -> None:
        self.saved = False

    def close(self) -> None:
        pass


class Watch:
    """A watch with a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.connected = False
        self.outputs = Outputs()
        self.watch = NewcomerWatch(self.outputs, MINIMUM, lambda: self.now)

    def begin(self) -> None:
        self.connected = False
        self.watch.begin(2, lambda: self.connected)
        self.watch.watch()

    def pass_(self, seconds: float) -> bool:
        """Let time pass, and return whether newcomers may end the round."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.watch.watch()
        return self.watch.may_end_round({"node-2"})


def test_rounds_without_a_save_become_longer_until_one_saves():
    run = Watch()
    for minimum in (300, 600, 1200):
        run.begin()
        assert not run.pass_(1000)  # imports
        run.connected = True
        assert not run.pass_(minimum - 1)
        assert run.pass_(2)
        run.watch.ends_round()
    run.begin()
    run.connected = True
    assert not run.pass_(1500)
    run.outputs.saved = True
    assert run.pass_(1)
    run.watch.ends_round()
    run.begin()
    run.connected = True
    assert run.pass_(302)


def test_a_save_before_a_loss_counts_as_progress(caplog):
    caplog.set_level("INFO")
    run = Watch()
    run.begin()
    run.connected = True
    assert run.pass_(302)
    run.watch.ends_round()
    run.begin()
    assert not run.pass_(5)
    assert "node-2 waits: the program has no session" in caplog.text
    assert "trained for 600 s" in caplog.text
    run.outputs.saved = True
    run.begin()  # the round has ended because a node was lost
    run.connected = True
    assert run.pass_(302)


def test_files_are_looked_for_only_while_a_round_has_no_session():
    run = Watch()
    run.watch.begin(2, lambda: False)
    assert run.outputs.begun == 0
    run.watch.watch()
    run.watch.watch()
    assert run.outputs.begun == 1
    run.watch.rest()
    run.watch.watch()
    assert run.outputs.begun == 2
