"""Checkpoints are taken at the configured interval, with few decisions, at any pace."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.save.schedule import CheckpointSchedule, decide, optimal_interval
from azureml_elastic.config import CheckpointPolicy, Plan


@given(pace=st.floats(0.001, 50), every=st.floats(1, 3600), slow_first=st.floats(1, 100))
def test_checkpoints_are_taken_at_the_configured_interval(pace, every, slow_first):
    now = saved = pace * slow_first  # the first step takes longer
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


def test_the_next_decision_is_at_most_as_many_steps_away_as_were_trained():
    assert decide(300.0, 0.0, 1, 0.0).steps_to_next == 1
    assert decide(300.0, 0.0, 4, 0.001).steps_to_next == 4


def overhead(interval, cost, between):
    """Return how much longer a run with losses at random moments takes (Daly's complete model, restarts for free)."""
    return between * (math.exp((interval + cost) / between) - 1) / interval


@given(cost=st.floats(0.01, 300), between=st.floats(600, 1e6))
def test_the_optimal_interval_minimizes_the_overhead(cost, between):
    best = optimal_interval(cost, between)
    assert best > 0
    if cost < between / 10:
        at_best = overhead(best, cost, between)
        for factor in (0.5, 0.8, 1.25, 2):
            assert at_best <= overhead(best * factor, cost, between) * 1.001


def test_a_checkpoint_costs_its_stall_and_the_slowdown_of_steps():
    clock = [100.0]
    schedule = CheckpointSchedule(CheckpointPolicy(every="auto"), None, clock=lambda: clock[0])
    schedule.begin(0)

    def save(step, stopped, continued, written_step, written):
        clock[0] = stopped
        schedule.saving(step)
        clock[0] = continued
        schedule.saved()
        clock[0] = written
        schedule.written(written_step)

    save(10, 110.0, 110.5, 18, 120.5)  # a step takes a second; eight during the write took ten
    assert schedule.cost_seconds == pytest.approx(0.5 + 2.0)
    assert schedule.write_seconds == pytest.approx(10.0)
    save(28, 130.5, 131.0, 30, 133.0)  # no slower
    assert schedule.cost_seconds == pytest.approx((2.5 + 0.5) / 2)


def test_a_run_with_losses_saves_more_often():
    policy = CheckpointPolicy(every="auto")
    assert CheckpointPolicy.model_validate_json(policy.model_dump_json()) == policy

    def interval(history, cost, now=1000.0):
        clock = [0.0]
        schedule = CheckpointSchedule(policy, None, clock=lambda: clock[0])
        schedule.begin(0, history=history)
        clock[0] = now
        schedule.saving(100)
        clock[0] += cost
        schedule.saved()
        schedule.written(100)
        return schedule.every

    calm, rough = interval((0, 36000), 1.0), interval((20, 36000), 1.0)
    assert rough < calm / 3
    assert interval((0, 36000), 0.01) < calm < interval((0, 36000), 20.0)
    assert interval((1000, 1000), 0.001) == 10.0
    assert interval((0, 1e8), 100.0) == 3600.0


@pytest.mark.parametrize(
    ("every", "every_steps", "expected"), [(None, None, None), (None, 7, 14), ("auto", None, 11), ("auto", 12, 11)]
)
def test_the_next_step_at_which_a_checkpoint_may_be_due_is_known(every, every_steps, expected):
    schedule = CheckpointSchedule(CheckpointPolicy(every=every, every_steps=every_steps), None, clock=lambda: 0.0)
    schedule.begin(10)
    assert schedule.next_candidate(10) == expected


def test_the_plan_holds_an_automatic_interval():
    plan = Plan.model_validate({"resources": {"max_instance_count": 2}, "checkpoint": {"every": "auto"}})
    assert Plan.from_json(plan.to_json()).checkpoint.every == "auto"
