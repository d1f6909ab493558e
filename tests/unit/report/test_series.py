"""Metrics and throughput over the steps."""

import math

from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ledger.events import Metrics
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.report.series import metric_series, throughput
from tests.support.histories import loss_and_newcomer, steps


def logged(step, value, *, number=1, name="loss"):
    return Metrics(time=float(step), node="node-0", round=number, step=step, values={name: value})


def test_a_repeated_step_has_the_value_of_its_highest_round():
    events = [logged(1, 9.0), logged(2, 8.0, number=2), logged(2, 7.0), logged(3, 6.0)]
    (series,) = metric_series(Picture.of(events))
    assert [(b.first, b.mean) for b in series.buckets] == [(1, 9.0), (2, 8.0), (3, 6.0)]


def test_losses_and_learning_rates_come_first():
    events = [logged(1, 1.0, name=name) for name in ("accuracy", "lr", "train_loss", "Zeta")]
    assert [series.name for series in metric_series(Picture.of(events))] == ["train_loss", "lr", "accuracy", "Zeta"]


def test_values_that_are_not_finite_are_counted_apart():
    (series,) = metric_series(Picture.of([logged(1, math.nan), logged(2, 3.0), logged(3, math.inf)]), most=1)
    (bucket,) = series.buckets
    assert (bucket.mean, bucket.low, bucket.high, bucket.not_finite, bucket.steps) == (3.0, 3.0, 3.0, 2, "1 to 3")
    (alone,) = metric_series(Picture.of([logged(1, math.nan)]))
    assert alone.buckets[0].mean is None


@given(
    st.dictionaries(st.integers(0, 10_000), st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_buckets_keep_the_extremes_and_are_not_too_many(values, most):
    (series,) = metric_series(Picture.of([logged(step, value) for step, value in values.items()]), most)
    assert len(series.buckets) <= most + 1
    assert min(b.low for b in series.buckets) == min(values.values())
    assert max(b.high for b in series.buckets) == max(values.values())
    assert all(b.first <= b.last for b in series.buckets)
    assert all(b.low <= b.mean <= b.high or math.isclose(b.low, b.high, rel_tol=1e-9) for b in series.buckets)


def test_the_throughput_of_a_round_is_that_of_one_node_s_clock():
    events = [*steps(1, ["a"], 1, 5, at=10.0, each=0.5), *steps(1, ["b"], 1, 4, at=999.0)]
    (series,) = throughput(Picture.of(events), {1: "b"})
    assert {b.mean for b in series.buckets} == {2.0}  # a has reported more steps
    assert (series.buckets[0].first, series.buckets[-1].last) == (2, 5)


def test_repeated_steps_count_once_and_no_interval_spans_two_rounds():
    (series,) = throughput(Picture.of(loss_and_newcomer()), {1: "node-2", 2: "node-1", 3: "node-1"})
    assert {b.mean for b in series.buckets} == {1.0}
    assert [b.first for b in series.buckets] == [*range(2, 11), *range(12, 21), *range(22, 31)]


def test_without_two_steps_there_is_no_throughput():
    assert throughput(Picture.of(steps(1, ["a"], 1, 1, at=1.0)), {}) == []


def test_samples_per_second_are_those_that_the_nodes_have_counted():
    counted = [each.model_copy(update={"samples": 64 * each.step}) for each in steps(1, ["a"], 1, 5, at=1.0, each=0.5)]
    by_step, by_sample = throughput(Picture.of([*counted, *steps(2, ["a"], 6, 9, at=9.0)]), {})
    assert (by_step.name, by_sample.name) == ("steps/s", "samples/s")
    assert {b.mean for b in by_sample.buckets} == {128.0}
    assert by_sample.buckets[-1].last == 5
    assert by_step.buckets[-1].last == 9
