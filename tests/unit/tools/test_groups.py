"""Tests that share what a module sets up run in one process of pytest-xdist, which sets it up once."""

from __future__ import annotations

from tests.support.paths import ROOT

pytest_plugins = ["pytester"]

SHARING = """
import os
import pytest

@pytest.fixture(scope="module")
def process():
    with open("set-up", "a") as file:
        file.write(f"{os.getpid()} ")

@pytest.mark.parametrize("number", range(6))
def test_shares(process, number):
    pass
"""


def test_a_modules_fixture_is_set_up_once(pytester, monkeypatch):
    """No run fails where it is not, as with pytest 9.2 and pytest-xdist 3.8: it only takes longer."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(SHARING)
    arguments = ("-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-p", "no:azureml-elastic")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=6)
    assert len((pytester.path / "set-up").read_text().split()) == 1
