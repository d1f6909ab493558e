"""Tests of the check that the code does not grow."""

from __future__ import annotations

from pathlib import Path

from tools import budget


def test_lines_are_those_of_each_package_and_of_the_modules_beside_them(tmp_path: Path) -> None:
    package, tests = tmp_path / "package", tmp_path / "tests"
    for path, lines in (("one/a.py", 2), ("one/inner/b.py", 3), ("two/c.py", 4), ("d.py", 5), ("one/e.txt", 9)):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text("x\n" * lines)
    (tests / "unit").mkdir(parents=True)
    (tests / "unit" / "f.py").write_text("x\n")
    assert budget.lines_of(package, tests) == {budget.MODULES: 5, "one": 5, "two": 4, "tests": 1}


def test_what_is_above_its_limit_or_has_none_is_found() -> None:
    found = budget.findings({"one": 5, "two": 4, "new": 1}, {"one": 4, "two": 4, "gone": 1})
    assert [line.partition(":")[0] for line in found] == ["gone", "new", "one"]
    assert "5 lines, 1 above its limit of 4" in found[2]
