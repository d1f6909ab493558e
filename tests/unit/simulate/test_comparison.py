"""Settings are swept, none on the Pareto front is beaten by another one, and the cheapest in time is recommended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from azureml_elastic.config import CheckpointPolicy, NodePool
from azureml_elastic.errors import UsageError
from azureml_elastic.simulate.comparison import candidates, pareto_front, recommend, sweep
from azureml_elastic.simulate.scenario import Scenario, SimulatedPool
from azureml_elastic.simulate.traces import (
    Change,
    Hazard,
    Trace,
    parse_checkpoint,
    parse_hazard,
    parse_seconds,
    parse_step_seconds,
    parse_work,
    synthetic_trace,
)

TRACE = synthetic_trace(Hazard(loss_every=3600), 8, 86400, seed=2)
POOLS = (
    SimulatedPool(NodePool("spot", max_instance_count=8, price_per_hour=1.0), TRACE),
    SimulatedPool(NodePool("dedicated", max_instance_count=2, price_per_hour=5.0)),
)


@pytest.fixture(scope="module")
def swept():
    return sweep(Scenario(POOLS, 1, 8, 5000, limit_seconds=86400))


def test_the_front_has_every_setting_that_no_other_beats(swept):
    front = pareto_front(swept)
    assert front
    for each in swept:
        beaten = any(other.result.seconds <= each.result.seconds and other.expense <= each.expense for other in front)
        assert beaten or not each.result.finished
    times, costs = [each.result.seconds for each in front], [each.expense for each in front]
    assert times == sorted(times)
    assert costs == sorted(costs, reverse=True)


def test_the_cheapest_setting_before_the_deadline_is_recommended(swept):
    front = pareto_front(swept)
    assert recommend(swept, front[0].result.seconds) is front[0]
    assert recommend(swept, 86400) is front[-1]
    assert recommend(swept, 1.0) is None
    assert recommend(swept) in front


def test_sizes_floors_and_intervals_are_tried(swept):
    assert {each.scenario.maximum for each in swept} == {8, 4, 2, 1}
    assert {each.scenario.pools[1].pool.min_instance_count for each in swept} >= {0, 1, 2}
    assert len({each.every for each in swept}) == 5
    assert {each.scenario.checkpoint for each in swept} >= {CheckpointPolicy(every="auto")}


def test_every_candidate_is_possible():
    assert all(each.minimum <= each.maximum for each in candidates(Scenario(POOLS, 2, 8, 10)))
    alone = replace(Scenario(POOLS, 2, 8, 10), pools=POOLS[:1])
    assert all(each.pools == POOLS[:1] for each in candidates(alone))


def test_a_repeated_trace_goes_on_as_it_began():
    trace = Trace((Change(0, 0, True), Change(5, 0, False), Change(7, 1, True)), 2, 10.0)
    longer = trace.repeated(25)
    assert longer.seconds == 30
    assert longer.up_seconds() == 3 * trace.up_seconds()
    assert trace.repeated(10) is trace


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (lambda text: parse_seconds(text, "--within"), "soon", "--within='soon' is no duration"),
        (lambda text: parse_seconds(text, "--within"), "5x", "give a number with ms, s, m, h or d"),
        (parse_hazard, "loss_evry=6h", "the hazard has 'loss_evry=6h'"),
        (parse_hazard, "back_after=6h", "has no losses"),
        (parse_hazard, "loss_every=0", "loss_every=0.0 of the hazard is not above 0"),
        (parse_hazard, "reclaim_every=1d,reclaim_share=2", "reclaim_share=2.0 of the hazard is not within 0 and 1"),
        (parse_hazard, "reclaim_every=1d,reclaim_share=x", "reclaim_share='x' is no number"),
        (parse_step_seconds, "1=2s,four=1s", "NODES=SECONDS"),
        (lambda text: parse_work(text, 1.0), "-5", "--work='-5' is no amount of work"),
        (lambda text: parse_work(text, 1.0), "0", "--work='0' is no amount of work"),
        (parse_checkpoint, "never", "--checkpoint-every='never' is no duration"),
        (parse_checkpoint, "0s", "--checkpoint-every=0 is not above 0"),
    ],
)
def test_mistakes_are_named_with_their_value(parse, text, words):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert words.lower() in str(caught.value).lower()


def test_values_are_read():
    assert [parse_seconds(text, "") for text in ("90", "1.5min", "1h30m", "6h", "7d")] == [90, 90, 5400, 21600, 604800]
    assert parse_hazard("loss_every=6h, reclaim_share=0.25") == Hazard(loss_every=21600, reclaim_share=0.25)
    assert parse_step_seconds("1=2s,4=0.6") == {1: 2.0, 4: 0.6}
    assert (parse_work("500", 2.0), parse_work("1.5nh", 2.0)) == (500, 2700)
    assert parse_checkpoint("100 steps") == CheckpointPolicy(every=None, every_steps=100)
    assert parse_checkpoint("5min") == CheckpointPolicy(every=300)
