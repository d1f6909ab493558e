"""Check that the code does not grow: lines of each top-level package, and of the tests, beside a limit for each.

``python tools/budget.py`` prints what is above its limit and exits with 1 if anything is; ``--all`` prints all. Limits
only go down: one that must go up says why in its commit, and what went down for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "azureml_elastic"
MODULES = "(modules)"

LIMITS: Mapping[str, int] = {
    "(modules)": 847,
    "checkpoint": 6_171,
    "cli": 2_842,
    "config": 1_535,
    "distributed": 1_191,
    "engines": 1_723,
    "environment": 600,
    "forks": 3_175,
    "ipc": 2_197,
    "ledger": 2_206,
    "local": 3_912,
    "nebula": 392,
    "node": 20_896,
    "program": 1_974,
    "report": 1_864,
    "simulate": 1_987,
    "submit": 5_715,
    "templates": 79,
    "testing": 4_483,
    "tests": 73_067,
    "train": 16_430,
}
"""Lines by package, with those of its templates and of its blank lines; ``(modules)`` are those of the root."""


def lines_of(package: Path = PACKAGE, tests: Path = ROOT / "tests") -> dict[str, int]:
    """Return the lines of each top-level package, of the modules beside them, and of the tests."""
    found: dict[str, int] = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else MODULES
        found[name] = found.get(name, 0) + _lines(path)
    found["tests"] = sum(map(_lines, tests.rglob("*.py")))
    return dict(sorted(found.items()))


def findings(found: Mapping[str, int], limits: Mapping[str, int] = LIMITS) -> list[str]:
    """Return what is wrong: a package above its limit or without one, and a limit without a package."""
    wrong = [
        f"{name}: {lines:,} lines, {lines - limits[name]:,} above its limit of {limits[name]:,}. Take something out, "
        "or raise the limit in tools/budget.py with the reason in the commit."
        for name, lines in found.items()
        if name in limits and lines > limits[name]
    ]
    wrong += [f"{name}: {found[name]:,} lines and no limit in tools/budget.py." for name in found.keys() - limits]
    wrong += [f"{name}: has a limit in tools/budget.py and no lines." for name in limits.keys() - found]
    return sorted(wrong)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def main() -> int:
    """Print what is wrong, or with ``--all`` all lines and limits; return 1 if anything is wrong."""
    found = lines_of()
    if "--all" in sys.argv[1:]:
        for name, lines in found.items():
            print(f"{lines:7,} of {LIMITS.get(name, 0):7,}  {name}")
        total = sum(found.values()) - found["tests"]
        print(f"{total:7,} without the tests")
    wrong = findings(found)
    print("\n".join(wrong), end="\n" if wrong else "")
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
