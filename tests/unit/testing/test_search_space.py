"""Points of a sweep, and its best trial."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.testing.jobs.search_space import best_trial, read_search_space

GRID, RANDOM = {"samplingAlgorithmType": "Grid"}, {"samplingAlgorithmType": "Random", "seed": 3}


def test_a_grid_has_all_combinations_in_order():
    space = read_search_space({"a": ["choice", [[1, 2.5]]], "b": ["choice", [["x", True]]]}, GRID)
    points = [{"a": a, "b": b} for a in ("1", "2.5") for b in ("x", "true")]
    assert list(space.points()) == points


def test_a_step_of_a_pipeline_has_its_search_space_by_names():
    steps = read_search_space({"a": {"type": "quniform", "q": 2, "min_value": 0, "max_value": 9}}, "random")
    assert steps == read_search_space({"a": ["quniform", [0, 9, 2]]}, {"samplingAlgorithmType": "Random"})


def test_random_points_of_a_small_space_are_all_of_it_and_none_twice():
    space = read_search_space({"a": ["choice", [[1, 2]]], "b": ["randint", [3]]}, RANDOM)
    points = [tuple(point.values()) for point in space.points()]
    assert sorted(points) == [(a, b) for a in "12" for b in "012"]


@given(st.integers(0, 1000), st.floats(-3, 2), st.floats(0.1, 2), st.floats(0.01, 0.5))
def test_random_values_are_what_the_expression_says(seed, low, width, step):
    space = read_search_space(
        {
            "uniform": ["uniform", [low, low + width]],
            "loguniform": ["loguniform", [low, low + width]],
            "quniform": ["quniform", [low, low + width, step]],
            "qnormal": ["qnormal", [low, width, step]],
            "lognormal": ["lognormal", [low, width]],
        },
        {**RANDOM, "seed": seed},
    )
    first = next(space.points())
    assert first == next(space.points())
    values = {name: float(value) for name, value in first.items()}
    assert low <= values["uniform"] <= low + width
    assert math.exp(low) * 0.999 <= values["loguniform"] <= math.exp(low + width) * 1.001
    assert low - step <= values["quniform"] <= low + width + step
    for name in ("quniform", "qnormal"):
        assert values[name] / step == pytest.approx(round(values[name] / step), abs=1e-6)
    assert values["lognormal"] > 0


def test_the_best_trial_has_the_best_value_that_was_ever_logged():
    values = {"a": [3.0, 1.0, 2.0], "b": [1.5, math.nan], "c": []}
    assert best_trial(values, maximize=False) == ("a", 1.0)
    assert best_trial(values, maximize=True) == ("a", 3.0)
    assert best_trial({"c": [], "d": [math.inf]}, maximize=True) is None
