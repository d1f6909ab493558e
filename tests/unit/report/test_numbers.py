"""Texts of numbers, and round positions on axes."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from azureml_elastic.report.cells import (
    duration_text,
    nice_ticks,
    number_text,
    tick_text,
    time_ticks,
    utc_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234, "1,234"),
        (0.123456, "0.1235"),
        (12.5, "12.50"),
        (1.5e-5, "1.5e-5"),
        (2.5e8, "2.5e8"),
        (-0.25, "-0.2500"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
    ],
)
def test_numbers(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"),
        (12.34, "12.3 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (7260, "2 h 1 min"),
        (90000, "1 d 1 h"),
        (math.nan, "unknown"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), st.integers(1, 8))
@example(900.0, -499999999601.0, 1)
def test_ticks_enclose_the_values_in_rising_order(one, other, count):
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high, count)
    slack = (abs(low) + abs(high)) * 1e-9
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= count + 3
    assert all(a < b for a, b in pairwise(ticks))


@given(st.floats(1e-3, 1e8))
def test_times_are_within_the_duration(duration):
    ticks = time_ticks(duration)
    assert ticks[0] == (0, "0")
    assert 1 <= len(ticks) <= 8
    assert all(0 <= at <= duration for at, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


def test_tick_texts_have_no_trailing_zeros():
    assert [tick_text(value) for value in (0, 0.5, 0.001, 7.5e-4, 2500, -1)] == [
        "0", "0.5", "0.001", "7.5e-4", "2,500", "-1",
    ]  # fmt: skip


def test_times_that_no_calendar_has_are_empty():
    assert utc_text(0) == "1970-01-01 00:00:00 UTC"
    assert utc_text(1e300) == utc_text(math.nan) == ""
