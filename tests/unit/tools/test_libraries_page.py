"""The page on public libraries is the one that a run makes whose tests pass, with the versions of the constraints."""

from __future__ import annotations

from tests.trainers.page import PAGE, as_expected, make_page


def test_the_page_is_that_of_the_cases():
    assert PAGE.read_text() == make_page(as_expected()), "python -m nox -s trainers writes it"
