"""Checkpoints come at the wanted interval, with few decisions, at any pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.train.cadence import decide


@given(pace=st.floats(0.001, 50), every=st.floats(1, 3600), slow_first=st.floats(1, 100))
def test_checkpoints_come_at_the_wanted_interval(pace, every, slow_first):
    now = saved = pace * slow_first  # the first step takes longer, as it does
    step, next_decision, decisions, gaps = 1, 1, 0, []
    while len(gaps) < 5:
        if step >= next_decision:
            decision = decide(every, now - saved, step, now / step)
            decisions += 1
            next_decision = step + decision.steps_to_next
            if decision.save:
                gaps.append(now - saved)
                saved = now
        jump = max(1, next_decision - step)
        step += jump
        now += jump * pace
    for gap in gaps[1:]:
        assert 0.97 * every - pace <= gap <= max(1.05 * every, every + pace) + pace
    assert decisions <= 40 + 10 * slow_first


@pytest.mark.parametrize(("since", "save"), [(0.0, False), (9.0, False), (9.9, True), (50.0, True)])
def test_a_checkpoint_is_due_once_the_interval_is_over(since, save):
    decision = decide(10.0, since, 100, 0.1)
    assert decision.save is save
    assert decision.steps_to_next >= 1


def test_the_next_decision_is_at_most_as_far_away_as_training_has_come():
    assert decide(300.0, 0.0, 1, 0.0).steps_to_next == 1
    assert decide(300.0, 0.0, 4, 0.001).steps_to_next == 4
