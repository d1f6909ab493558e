"""Runs of scripts that are observed from outside, and comparisons of what was observed.

:mod:`tests.support.observer` writes a line for each optimizer step of each process.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.support.stacks import run_stock

_OF_A_ROUND = re.compile(r"\.round-\d+\.[0-9a-f]+")
"""The end of the name of a checkpoint's folder: the round, and a random number."""

_OBSERVER = Path(__file__).with_name("observer.py")


def run_observed(script, folder, *arguments, results="all_results.json", **options):
    """Run a script under the observer on a local cluster; see :func:`tests.support.stacks.run_stock`."""
    return run_stock(_OBSERVER, folder, "--script", str(script), *arguments, results=results, **options)


def observed(run):
    """Return the lines of all processes by optimizer and step."""
    lines = [json.loads(line) for file in run.folder.glob("observed.*") for line in file.read_text().splitlines()]
    found = defaultdict(list)
    for line in lines:
        found[line["optimizer"], line["step"]].append(line)
    return found


def samples(lines):
    """Return how often each sample was trained."""
    return Counter(sample for line in lines for sample in line["samples"])


def files(run):
    """Return the files that the script has left."""
    names = (path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file())
    names = (_OF_A_ROUND.sub("", name) for name in names)
    by_process = ("observed.", "random_states_", "rng_state", "events.out.tfevents.", "__")
    return {name for name in names if not Path(name).name.startswith(by_process)}


def assert_same(found, expected, close):
    """Compare what a script has counted."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        number = isinstance(value, float) or (isinstance(value, list) and value and isinstance(value[0], float))
        limit = close.get(name, 1e-6)
        assert value == (pytest.approx(expected[name], rel=limit) if number else expected[name]), name


def share(lines):
    """Return how often a step is complete, by the lines of its ranks."""
    return sum(1 / line["ranks"] for line in lines)


def assert_same_steps(found, expected, weights, rolled_back=0):
    """Compare each optimizer step: its samples, learning rate and weights.

    A step is complete once one rank has completed it, so rank 0 may be killed before its line of that step is written:
    in one step at most.
    """
    assert found.keys() == expected.keys()
    short, twice = set(), set()
    for key, lines in found.items():
        wanted = expected[key]
        assert share(lines) <= share(wanted) * (2 if rolled_back else 1), f"{key} was trained more than once"
        if share(lines) > share(wanted):
            twice.add(key[1])
        elif share(lines) < share(wanted):
            short.add(key[1])
            assert samples(lines) < samples(wanted), key
        else:
            assert samples(lines) == samples(wanted), key
        for line in lines:
            assert line["rate"] == pytest.approx(wanted[0]["rate"], abs=1e-12), key
            assert line["weights"] == pytest.approx(wanted[0]["weights"], rel=weights), key
    assert len(short) <= 1, f"lines are missing of the steps {short}"
    # With the one whose first model alone was updated.
    assert len(twice) <= rolled_back + bool(rolled_back), f"the steps {twice} were trained again"
