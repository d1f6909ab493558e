"""The page on engines names a test for each guarantee."""

import re

from tests.support.paths import ROOT

PAGE = (ROOT / "docs/how-to/engines.md").read_text()


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 15
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text()


def test_every_number_in_the_table_is_that_of_a_test():
    table = PAGE.partition("## What holds")[2].partition("| number | test |")
    numbers = set(re.findall(r"^\| (\d+) \|", table[2], re.MULTILINE))
    used = {number for group in re.findall(r"\((\d+(?:, \d+)*)\)", table[0]) for number in group.split(", ")}
    assert used == numbers
