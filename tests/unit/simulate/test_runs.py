"""Whatever machines come and go: the work is done, each node-second is accounted, and elastic runs are the fastest."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_elastic.config import CheckpointPolicy, NodePool, RendezvousTimings, ReplacementPolicy
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.bill import Prices
from azureml_elastic.simulate.comparison import simulate
from azureml_elastic.simulate.scenario import STRATEGIES, Parameters, Scenario, SimulatedPool
from azureml_elastic.simulate.traces import Change, Hazard, Trace, synthetic_trace

DURATIONS = Parameters(
    step_seconds={1: 7.3},
    serial_fraction=0.1,
    provisioning_seconds=20,
    start_seconds=11,
    preload_seconds=0,
    first_step_seconds=5,
    restore_seconds=9,
    recovery_seconds={"node loss": 4},
    checkpoint_pause_seconds=1.7,
    checkpoint_write_seconds=3,
)
EAGER = ReplacementPolicy(interval=0.001, retry_after=1e-6, fallback_after=1e6, max_replacements=10**6)
PROMPT = RendezvousTimings(heartbeat_interval=0.001, heartbeat_timeout=0.002, table_heartbeat_interval=0.001)


@st.composite
def traces(draw, most=4):
    """Return a trace in which the machines come and go in turn, and in the end are all available."""
    machines = draw(st.integers(1, most))
    changes = []
    for machine in range(machines):
        periods = draw(st.lists(st.integers(1, 900), max_size=8))
        times = [sum(periods[: count + 1]) + 0.01 * machine for count in range(len(periods))]
        down_first = draw(st.booleans())
        changes += [Change(0.0, machine, True)] * (not down_first)
        changes += [Change(time, machine, bool(number % 2) ^ down_first) for number, time in enumerate(times)]
        if not [change for change in changes if change.machine == machine][-1:] or not changes[-1].up:
            changes.append(Change((times or [0.0])[-1] + 50.0, machine, True))
    return Trace(tuple(sorted(changes)), machines, max(change.time for change in changes))


def scenario(trace, minimum=1, work=400, **fields):
    pool = NodePool("spot", max_instance_count=trace.machines, price_per_hour=3.0)
    return Scenario(
        (SimulatedPool(pool, trace),),
        minimum,
        trace.machines,
        work,
        **{"parameters": DURATIONS, "replacement": EAGER, "checkpoint": CheckpointPolicy(every=100), **fields},
    )


def outcomes(scenario):
    return [simulate(scenario, strategy) for strategy in STRATEGIES]


@given(traces(), st.integers(0, 40), st.sampled_from(["auto", 100, 1]))
@settings(deadline=None)
def test_the_work_is_done_and_every_node_second_is_accounted(trace, notice, every):
    durations = DURATIONS.model_copy(update={"notice_seconds": notice})
    policy = CheckpointPolicy(every=every)
    for result in outcomes(scenario(trace, parameters=durations, checkpoint=policy, limit_seconds=9e5)):
        assert result.finished
        assert result.steps == 400
        assert sum(total.seconds for total in result.activities) == result.node_seconds  # to the last bit
        assert all(total.seconds > 0 for total in result.activities)
        assert float(result.bill.hours) * 3600 == pytest.approx(result.node_seconds)
        least = 400 * durations.step_time(trace.machines)
        assert result.seconds >= least


@given(traces(), st.integers(1, 2000))
@settings(deadline=None)
def test_a_run_that_is_given_up_is_accounted_too(trace, limit):
    for result in outcomes(scenario(trace, work=10**6, limit_seconds=limit)):
        assert not result.finished
        assert result.seconds == limit
        assert "was not done within" in result.why
        assert all(total.seconds > 0 for total in result.activities)
        assert sum(total.seconds for total in result.activities) == result.node_seconds


@given(traces())
@settings(deadline=None, max_examples=200)
def test_an_elastic_run_of_the_same_size_is_never_slower_than_restarts(trace):
    """Both train on all machines or not at all, with the same checkpoints, and are as quick to see a change."""
    policy = CheckpointPolicy(every=None, every_steps=10)
    same = scenario(trace, trace.machines, checkpoint=policy, timings=PROMPT, limit_seconds=9e5)
    restarted, elastic = simulate(same, "restart"), simulate(same, "elastic")
    assert elastic.seconds <= restarted.seconds + 0.5


@given(traces(), st.integers(1, 1000))
@settings(deadline=None, max_examples=30)
def test_the_cost_is_linear_in_the_price(trace, cents):
    def priced(price):
        table = Prices(currency="USD", date=None, source="test", per_hour={"size": {"low_priority": price}})
        base = scenario(trace)
        pools = tuple(replace(pool, size="size", tier="low_priority") for pool in base.pools)
        return simulate(replace(base, pools=pools, prices=table), "elastic").cost

    price = Decimal(cents) / 100
    assert float(priced(price)) == pytest.approx(float(priced(Decimal(1)) * price), rel=1e-12)


def test_a_node_that_is_always_there_keeps_all_steps():
    trace = synthetic_trace(Hazard(loss_every=600, reclaim_every=3000, reclaim_share=1.0), 4, 50_000, seed=3)
    pools = (
        SimulatedPool(NodePool("dedicated", min_instance_count=1, max_instance_count=1)),
        SimulatedPool(NodePool("spot", max_instance_count=4), trace),
    )
    result = simulate(
        Scenario(pools, 1, 5, 5000, DURATIONS, replacement=EAGER, checkpoint=CheckpointPolicy(every=None)), "elastic"
    )
    assert result.finished
    assert result.lost_steps == 0
    assert result.restarts > 20
    assert {total.cause for total in result.activities} >= {"node loss", "scale-up"}
    assert 5000 * DURATIONS.step_time(5) < result.seconds < 5000 * DURATIONS.step_time(1)


def test_announced_losses_lose_no_work_and_are_accounted_as_preemptions():
    trace = synthetic_trace(Hazard(loss_every=900), 3, 20_000, seed=1)
    noticed = DURATIONS.model_copy(update={"notice_seconds": 30.0})
    result = simulate(scenario(trace, parameters=noticed, work=2000), "elastic")
    assert result.finished
    causes = {total.cause for total in result.activities if total.activity in ("recovering", "lost work")}
    assert "preemption" in causes
    assert "node loss" not in causes


def test_the_limit_of_replacements_is_named():
    trace = synthetic_trace(Hazard(loss_every=300, back_after=10), 2, 50_000, seed=1)
    result = simulate(
        scenario(trace, replacement=ReplacementPolicy(max_replacements=3), limit_seconds=50_000, work=10**5), "elastic"
    )
    assert not result.finished
    assert result.why == "The limit of 3 replacements is reached; raise max_replacements."


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"minimum": 0}, "0:2 nodes are no range"),
        ({"minimum": 3}, "3:2 nodes are no range"),
        ({"work": 0}, "0 steps is below the limit of 1"),
        ({"limit_seconds": 0.0}, "0 s is not above 0"),
    ],
)
def test_impossible_scenarios_are_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        scenario(Trace((Change(0, 0, True),), 2, 10.0), **fields)


def test_a_run_that_has_done_its_work_within_the_time_is_finished_though_its_nodes_have_not_ended():
    durations = DURATIONS.model_copy(update={"finish_seconds": 1e5})
    trace = Trace((Change(0.0, 0, True),), 1, 1.0)
    for result in outcomes(scenario(trace, parameters=durations, limit_seconds=9e4)):
        assert (result.finished, result.why) == (True, "")
