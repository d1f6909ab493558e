"""Silence is counted without the time in which this process was paused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.node.rendezvous.hub.pause_detection import PauseDetector

TICK = 0.5


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0.0, 5.0), max_size=40), st.floats(0.0, 1.0))
def test_only_pauses_are_subtracted(gaps, part):
    clock = Clock()
    detector = PauseDetector(clock, TICK)
    moments = [clock.now]
    for gap in gaps:
        clock.now += gap
        assert detector.tick() == pytest.approx(gap, abs=1e-6)
        moments.append(clock.now)
    since = moments[0] + part * (moments[-1] - moments[0])
    late = [after - before for before, after in itertools.pairwise(moments) if after > since]
    away = sum(gap - TICK for gap in late if gap > 2 * TICK)
    assert detector.silence(since) == pytest.approx(clock.now - since - away, abs=1e-6)


def test_silence_is_detected_on_a_machine_that_is_always_late():
    clock = Clock()
    detector = PauseDetector(clock, TICK)
    since = clock.now
    for _ in range(10_000):
        clock.now += 4 * TICK
        detector.tick()
        assert detector.silence(clock.now) == 0
    assert detector.silence(clock.now - 100 * TICK) == pytest.approx(25 * TICK)
    assert detector.silence(since) >= 10_000 * TICK
