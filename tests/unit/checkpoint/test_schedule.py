"""Checkpoints and snapshots are taken at the configured interval, with few decisions, at any pace."""

from __future__ import annotations

import logging
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.save.schedule import (
    CheckpointSchedule,
    SnapshotSchedule,
    decide,
    lost_share,
    optimal_interval,
)
from azureml_elastic.checkpoint.snapshots.replication import RankMemory, node_short_of_memory
from azureml_elastic.config import CheckpointPolicy


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


@given(cost=st.floats(0.01, 300), between=st.floats(600, 1e6), factor=st.floats(0.2, 5))
def test_no_interval_loses_less_than_the_optimal_one(cost, between, factor):
    best = optimal_interval(cost, between)
    if cost < between / 1000:  # copies that take a larger part of the time need Daly's terms of higher order
        assert lost_share(best, cost, between) <= lost_share(best * factor, cost, between) * 1.001


class Alone:
    """The control group of one rank."""

    def from_main(self, value):
        return value


def measured(cost, losses=1000, seconds=3600.0 * 1000, policy=None):
    """A schedule after its first snapshot, with losses an hour apart."""
    clock = [0.0]
    schedule = SnapshotSchedule(policy or CheckpointPolicy(), Alone(), clock=lambda: clock[0])
    schedule.begin(0, history=(losses, seconds))
    schedule.saving(1)
    clock[0] += cost
    schedule.saved()
    schedule.written(1)
    return schedule


@pytest.mark.parametrize(("cost", "percent"), [(0.01, 0.24), (0.15, 0.91), (0.3, 1.29), (2.0, 3.33)])
def test_snapshots_and_losses_an_hour_apart_cost_a_known_share_of_the_time(cost, percent, caplog):
    schedule = measured(cost)
    assert 100 * schedule.lost_share == pytest.approx(percent, abs=0.006)
    with caplog.at_level(logging.WARNING):
        schedule.tell_what_is_lost()
        schedule.tell_what_is_lost()
    assert len(caplog.records) == (percent > 1)
    if percent > 1:
        assert f"{percent:.1f} % of the time" in caplog.text
        assert "with a cost of 0.18 s" in caplog.text


@pytest.mark.parametrize("policy", [{"snapshot_every": 5}, {"snapshot_every_steps": 3}, {"snapshot_every": None}])
def test_nothing_is_said_of_intervals_that_were_given(policy, caplog):
    with caplog.at_level(logging.WARNING):
        measured(20.0, policy=CheckpointPolicy(**policy)).tell_what_is_lost()
    assert not caplog.records


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, 1),
        ({"snapshot_every_steps": 7}, 7),
        ({"snapshot_every": 60, "snapshot_every_steps": 7}, 1),
        ({"snapshot_every": None}, None),
    ],
)
def test_by_default_snapshots_come_by_time_unless_steps_are_given(policy, expected):
    assert measured(0.1, policy=CheckpointPolicy(**policy)).next_candidate(0) == expected


def test_a_run_that_loses_a_node_every_hour_loses_less_than_a_hundredth_of_its_time():
    """Each loss costs the steps since the last snapshot, and each round learns the cost anew."""
    chance, cost, step_seconds = random.Random(1), 0.15, 2.0
    clock, lost, losses = [0.0], 0.0, 0
    while losses < 60:
        began, until = clock[0], clock[0] + chance.expovariate(1 / 3600)
        schedule = SnapshotSchedule(CheckpointPolicy(), Alone(), clock=lambda: clock[0])
        schedule.begin(0, history=(losses, clock[0]))
        step = 0
        while clock[0] < until:
            step += 1
            clock[0] += step_seconds
            if schedule.due(step):
                schedule.saving(step)
                clock[0] += cost
                lost += cost
                schedule.saved()
                schedule.written(step)
                began = clock[0]
        lost += clock[0] - began
        losses += 1
    assert 0.005 < lost / clock[0] < 0.01


def test_what_else_slows_steps_does_not_count_as_the_pace_of_undisturbed_ones():
    """A checkpoint lasts from step 10 to step 12; a step takes a second, and two during a write."""
    clock = [10.0]
    schedule = SnapshotSchedule(CheckpointPolicy(), None, clock=lambda: clock[0])
    schedule.begin(0)
    clock[0] = 40.0
    schedule.disturbed(12)
    clock[0] = 44.0
    schedule.saving(16)
    schedule.saved()
    clock[0] = 48.0
    schedule.written(18)
    assert schedule.cost_seconds == pytest.approx(2.0)


def test_snapshots_need_memory_on_each_node():
    def fits(*ranks):
        return node_short_of_memory([RankMemory(*rank) for rank in ranks]) is None

    assert fits((0, 100, 800), (1, 100, 900))  # four shards in half of it
    assert not fits((0, 100, 800), (1, 100, 799))
    assert not fits((0, 100, 1500), (0, 100, 1599))  # two ranks of a node
    assert fits((0, 100, 1600), (0, 100, 1600), (2, 10, 80))
    found = node_short_of_memory([RankMemory(0, 1, 100), RankMemory(1, 60, 900), RankMemory(1, 70, 800)])
    assert found == RankMemory(1, 130, 800)
