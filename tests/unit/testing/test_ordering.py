"""The order of a pipeline's steps."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.planning import Due, Step, check_order, due_steps

DONE, RUNS, FAILED, WAITS = (
    Step("Completed", started=True, cancelled=False, reads=()),
    Step("Running", started=True, cancelled=False, reads=()),
    Step("Failed", started=True, cancelled=False, reads=()),
    Step("NotStarted", started=False, cancelled=False, reads=()),
)


def reader(*statuses, cancelled=False):
    return Step("NotStarted", started=False, cancelled=cancelled, reads=statuses)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (WAITS, Due(start=("step",))),
        (reader("Completed", "Completed"), Due(start=("step",))),
        (reader("Completed", "Running"), Due()),
        (reader("Completed", "NotStarted"), Due()),
        (reader("Failed"), Due(skip=("step",))),
        (reader("Running", "Canceled"), Due(skip=("step",))),
        (reader("Completed", cancelled=True), Due(skip=("step",))),
        (RUNS, Due()),
        (DONE, Due()),
    ],
)
def test_a_step_starts_when_all_that_it_reads_is_there(step, expected):
    assert due_steps({"step": step}, cancelled=False, continues=True) == expected


def test_a_failed_step_stops_the_others_unless_they_continue():
    steps = {"a": FAILED, "b": RUNS, "c": WAITS, "d": DONE}
    assert due_steps(steps, cancelled=False, continues=False) == Due(skip=("c",), cancel=("b",))
    assert due_steps(steps, cancelled=False, continues=True) == Due(start=("c",))


def test_a_cancelled_pipeline_starts_nothing():
    assert due_steps({"a": RUNS, "b": WAITS}, cancelled=True, continues=True) == Due(skip=("b",), cancel=("a",))


def test_steps_that_wait_for_each_other_are_refused():
    check_order({"a": frozenset(), "b": frozenset({"a"}), "c": frozenset({"a", "b"})})
    with pytest.raises(UsageError, match=r"wait for each other: (a reads b reads a|b reads a reads b)"):
        check_order({"a": frozenset({"b"}), "b": frozenset({"a"})})
