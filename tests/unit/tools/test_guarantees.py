"""The tests that the table of guarantees names exist, and so do the sessions that run them.

What the pages on security and on engines promise in tables has its tests there.
"""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PAGE = (ROOT / "tests" / "guarantees.md").read_text()
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)


def cells(lines: str) -> list[list[str]]:
    """Return the rows of a Markdown table below its heading."""
    rows = [line.strip("|").split(" | ") for line in lines.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


ROWS = {name: cells(text) for name, text in SECTIONS}
ALL = [row for rows in ROWS.values() for row in rows]


def table_of(page: str, heading: str) -> tuple[list[str], list[list[str]]]:
    """Return the column names and the rows of the table below a heading of a page in ``docs``."""
    section = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (names,) = cells(f"| |\n{next(line for line in section.splitlines() if line.startswith('| '))}")
    return names, cells(section)


def is_there(test: str) -> bool:
    path, _, name = test.strip("`").partition("::")
    file = ROOT / "tests" / path
    return file.exists() and re.search(rf"^ *def {name}\(", file.read_text(), re.MULTILINE) is not None


def test_each_named_test_exists():
    assert [test for _, test, _ in ALL if not is_there(test)] == []


def test_each_named_session_exists():
    there = re.findall(r"^@nox\.session(?:\(.*\))?\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    named = [re.findall(r"`(\w+)`", sessions) for _, _, sessions in ALL]
    assert all(named)
    assert {session for sessions in named for session in sessions} <= set(there)


def test_every_line_of_the_tables_is_a_guarantee():
    assert len(ALL) > 80
    assert PAGE.count("::test_") == len(ALL)
    for name, rows in ROWS.items():
        assert len({test for _, test, _ in rows}) == len(rows), f"a test is named once in {name}"


def test_each_threat_has_its_test():
    _, threats = table_of("explanation/security.md", "Threats")
    assert len(threats) > 10
    tested = {guarantee for guarantee, _, _ in ROWS["Security"]}
    assert [threat for threat, _ in threats if threat not in tested] == []


def test_what_an_engine_promises_has_its_test_and_the_rest_begins_with_no():
    (_, *engines), promises = table_of("how-to/engines.md", "What holds")
    promised = {
        (engine, guarantee)
        for guarantee, *answers in promises
        for engine, answer in zip(engines, answers, strict=True)
        if answer.partition(":")[0] != "no"
    }
    split = [guarantee.partition(": ") for guarantee, _, _ in ROWS["Engines"]]
    tested = {(engine, each) for names, _, held in split for engine in names.split(", ") for each in held.split("; ")}
    assert tested == promised
