"""Silence is counted without the time in which this process was paused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.node.core.pauses import PauseDetector

TICK = 0.5


@given(st.lists(st.floats(0.0, 5.0), max_size=40), st.floats(0.0, 1.0))
def test_only_pauses_are_subtracted(gaps, part):
    moments = [*itertools.accumulate(gaps, initial=100.0)]
    detector = PauseDetector(moments[0], TICK)
    for now in moments[1:]:
        detector.tick(now)
    now = moments[-1]
    since = moments[0] + part * (now - moments[0])
    late = [after - before for before, after in itertools.pairwise(moments) if after > since]
    away = sum(gap - TICK for gap in late if gap > 2 * TICK)
    assert detector.silence(since, now) == pytest.approx(now - since - away, abs=1e-6)


def test_silence_is_detected_on_a_machine_that_is_always_late():
    since = now = 100.0
    detector = PauseDetector(now, TICK)
    for _ in range(10_000):
        now += 4 * TICK
        detector.tick(now)
        assert detector.silence(now, now) == 0
    assert detector.silence(now - 100 * TICK, now) == pytest.approx(25 * TICK)
    assert detector.silence(since, now) >= 10_000 * TICK


@pytest.mark.parametrize(
    ("pauses", "given_up"), [([2.5], True), ([2.4], False), ([1.5, 1.5], True), ([2.5, *[0.5] * 12], False)]
)
def test_a_process_that_did_not_run_for_almost_the_timeout_was_given_up_until_it_has_run_for_a_while(pauses, given_up):
    now = 100.0
    detector = PauseDetector(now, TICK)
    for seconds in pauses[:-1]:
        now += seconds
        detector.tick(now)
    assert detector.was_given_up(3.0, now + pauses[-1]) == given_up
