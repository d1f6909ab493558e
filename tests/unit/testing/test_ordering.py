"""The order of a pipeline's steps."""

import pytest

from azureml_elastic.testing.jobs.planning import step_due


def due(status="NotStarted", reads=(), *, stops=False, cancelled=False):
    started = status not in ("NotStarted", "Canceled")
    return step_due(status, reads, started=started, cancelled=cancelled, stops=stops)


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ((), "start"),
        (("Completed", "Completed"), "start"),
        (("Completed", "Running"), None),
        (("Completed", "NotStarted"), None),
        (("Failed",), "skip"),
        (("Running", "Canceled"), "skip"),
    ],
)
def test_a_step_starts_when_all_that_it_reads_is_there(reads, expected):
    assert due(reads=reads) == expected


def test_a_cancelled_step_never_starts():
    assert due(reads=("Completed",), cancelled=True) == "skip"


@pytest.mark.parametrize(
    ("status", "expected"),
    [("NotStarted", "skip"), ("Running", "cancel"), ("Completed", None), ("Failed", None), ("Canceled", None)],
)
def test_what_a_pipeline_that_stops_does_with_its_steps(status, expected):
    assert due(status, stops=True) == expected
    assert due(status) == ("start" if status == "NotStarted" else None)


def test_a_step_is_cancelled_once():
    assert due("Running", stops=True, cancelled=True) is None
