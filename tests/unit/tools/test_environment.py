"""Tests of the check that the environment is used in one package."""

from __future__ import annotations

import pytest

from tools import environment

ELSEWHERE = f"{environment.PACKAGE}/train/session.py"


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import os\nos.environ['X']", "2: os.environ"),
        ("import os\n\ndef read():\n    return os.getenv('X')", "4: os.getenv"),
        ("import os as system\nsystem.putenv('X', '1')", "2: system.putenv"),
        ("from os import environ as variables", "1: from os import environ"),
        ("import posix\nposix.environ", "2: posix.environ"),
    ],
)
def test_a_use_elsewhere_is_found(source: str, use: str) -> None:
    assert environment.findings({ELSEWHERE: source}, {}) == [f"{ELSEWHERE}:{use} outside azureml_elastic.environment"]


def test_the_package_and_the_exceptions_may_use_it() -> None:
    source = "import os\nos.environ"
    assert environment.findings({f"{environment.HOME}process.py": source}, {}) == []
    assert environment.findings({ELSEWHERE: source}, {ELSEWHERE: "a reason"}) == []


def test_other_names_are_no_uses() -> None:
    source = "import os\nos.path\nprocess.environ()\nenviron = {}\n'os.environ'"
    assert environment.findings({ELSEWHERE: source}, {}) == []


def test_an_exception_that_is_none_any_more_is_found() -> None:
    (gone,) = environment.findings({ELSEWHERE: ""}, {ELSEWHERE: "a reason"})
    assert "no exception any more" in gone
    (missing,) = environment.findings({}, {ELSEWHERE: "a reason"})
    assert "does not exist" in missing


def test_the_project_has_no_findings() -> None:
    assert environment.main() == 0
