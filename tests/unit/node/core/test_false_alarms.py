"""Nodes that pause for seconds and go on, over a hundred simulated hours."""

from __future__ import annotations

import random

import pytest

from tests.support.paths import ROOT


@pytest.fixture
def silence(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import silence

    return silence


def test_a_limit_that_is_learned_raises_no_more_false_alarms_than_a_fixed_one_of_three_times_the_seconds(silence):
    def seconds(source: random.Random) -> float:
        return 0.3 * source.paretovariate(1.3)

    scenario = silence.Scenario("some pauses a day", 0.2, seconds)
    fixed = [
        silence.simulate_pauses(scenario, seed=seed, rule=silence.FixedLimit, timings=silence.BEFORE)
        for seed in range(3)
    ]
    learned = [silence.simulate_pauses(scenario, seed=seed) for seed in range(3)]
    assert sum(each.rounds for each in fixed) > 10
    assert sum(each.rounds for each in learned) <= sum(each.rounds for each in fixed)


def test_nodes_that_never_pause_are_given_up_after_the_shortest_time(silence):
    scenario = silence.Scenario("late beats", 1.0, lambda source: source.uniform(0.0, 0.2))
    found = silence.simulate_pauses(scenario, seed=1, hours=10)
    assert found.pauses > 50
    assert found.rounds == 0
    assert found.limit == pytest.approx(1.0)
