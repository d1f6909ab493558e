"""Which evictions are due."""

import pytest
from pydantic import ValidationError

from azureml_elastic.errors import UsageError
from azureml_elastic.testing import Eviction, read_trace
from azureml_elastic.testing.jobs.machines import Target, due


def job(seconds=0.0, step=0, nodes=(0, 1, 2)):
    return Target(seconds, step, frozenset(nodes))


def test_an_eviction_waits_for_its_second():
    eviction = Eviction(node=1, after=5)
    assert due([eviction], {"a": job(4.9)}) == []
    assert due([eviction], {"a": job(5)}) == [(eviction, "a")]


def test_an_eviction_waits_for_its_step():
    eviction = Eviction(node=1, at_step=20)
    assert due([eviction], {"a": job(100, 19)}) == []
    assert due([eviction], {"a": job(0, 20)}) == [(eviction, "a")]


def test_an_eviction_waits_for_its_node():
    assert due([Eviction(node=3, after=0)], {"a": job(9)}) == []


def test_an_eviction_hits_the_first_job_that_has_the_node():
    eviction = Eviction(node=2, after=0)
    assert due([eviction], {"a": job(nodes=[0]), "b": job(), "c": job()}) == [(eviction, "b")]


def test_two_at_once_do_not_take_the_same_node():
    first, second = Eviction(node=1, after=1), Eviction(node=1, after=2)
    assert due([first, second], {"a": job(9)}) == [(first, "a")]


@pytest.mark.parametrize(
    "values", [{}, {"after": 1, "at_step": 1}, {"after": -1}, {"at_step": -1}, {"after": 1, "notice": -1}]
)
def test_an_invalid_eviction_is_refused(values):
    with pytest.raises(ValidationError, match="Eviction"):
        Eviction(node=0, **values)


def test_a_trace_is_a_list_of_evictions(tmp_path):
    (tmp_path / "trace.csv").write_text("# seconds,node,notice\n12.5, 1, 0\n\n30,2  # the usual notice\n")
    assert read_trace(tmp_path / "trace.csv") == (
        Eviction(node=1, after=12.5, notice=0),
        Eviction(node=2, after=30, notice=30),
    )


@pytest.mark.parametrize("line", ["12", "a,b", "1,2,3,4", "1,1.5"])
def test_an_invalid_line_is_refused_with_its_number(tmp_path, line):
    (tmp_path / "trace.csv").write_text(f"1,1\n{line}\n")
    with pytest.raises(UsageError, match="Line 2"):
        read_trace(tmp_path / "trace.csv")
