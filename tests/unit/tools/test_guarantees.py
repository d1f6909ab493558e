"""The tests that the table of guarantees names exist, and so do the sessions that run them."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PAGE = (ROOT / "tests" / "guarantees.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| guarantee ")
]


def is_there(test: str) -> bool:
    path, _, name = test.strip("`").partition("::")
    file = ROOT / "tests" / path
    return file.exists() and re.search(rf"^ *def {name}\(", file.read_text(), re.MULTILINE) is not None


def test_each_named_test_exists():
    assert [test for _, test, _ in ROWS if not is_there(test)] == []


def test_each_named_session_exists():
    there = re.findall(r"^@nox\.session(?:\(.*\))?\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    named = [re.findall(r"`(\w+)`", sessions) for _, _, sessions in ROWS]
    assert all(named)
    assert {session for sessions in named for session in sessions} <= set(there)


def test_every_line_of_the_tables_is_a_guarantee():
    assert len(ROWS) > 80
    assert PAGE.count("::test_") == len(ROWS)
    assert len({test for _, test, _ in ROWS}) == len(ROWS), "a test is named once"
