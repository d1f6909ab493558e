"""The tests that the page about security names exist."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "explanation" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+?)(?:_?…)?`", PAGE)))
THERE = [
    name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
]


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists(name):
    assert any(each.startswith(name) for each in THERE), f"a page names {name}, which is nowhere"


def test_each_threat_has_its_test():
    table = PAGE.partition("## Threats")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| threat")]
    assert len(rows) > 10
    assert all("`test_" in row for row in rows), rows
