"""The page of the documentation on public libraries, made of the cases and of what a run has found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

from tests.support.paths import ROOT
from tests.trainers.cases import CASES, Case

__all__ = ["FAULTS", "PAGE", "UNDISTURBED", "as_expected", "make_page"]

PAGE = ROOT / "docs" / "how-to" / "stacks" / "libraries.md"
UNDISTURBED, FAULTS = "undisturbed", "faults"
_TEMPLATE = Template(Path(__file__).with_name("page.md").read_text())


def as_expected() -> dict[tuple[str, str], bool]:
    """Return what a run finds if all tests pass: by the case's name and by what is done, whether it holds."""
    return {(case.id, what): case.holds(faults=what == FAULTS) for case in CASES for what in (UNDISTURBED, FAULTS)}


def make_page(found: Mapping[tuple[str, str], bool]) -> str:
    """Return the page for what a run has found."""
    rows = [_row(case, found) for case in sorted(CASES, key=lambda case: case.library.lower())]
    return _TEMPLATE.substitute(rows="\n".join(rows))


def _row(case: Case, found: Mapping[tuple[str, str], bool]) -> str:
    holds = ["yes" if found[case.id, what] else "no" for what in (UNDISTURBED, FAULTS)]
    notes = "; ".join(filter(None, (case.notes, case.fails)))
    return f"| {case.library} {_version(case.library)} | {case.shape} | {holds[0]} | {holds[1]} | {notes} |"


def _version(library: str) -> str:
    """Return the version that the tests install."""
    if library == "deepspeed":
        return re.search(r'(?m)^DEEPSPEED = "(.*)"', (ROOT / "noxfile.py").read_text())[1]
    name = re.escape(library).replace(r"\-", "[-_]")
    return re.search(rf"(?im)^{name}==([^\s;]+)", (ROOT / "constraints.txt").read_text())[1]
