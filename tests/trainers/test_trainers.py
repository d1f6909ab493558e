"""Real trainers of public libraries train under faults as they do without, by an observer outside of them.

``python -m nox -s trainers`` runs all; the default run those that are marked as quick and whose library is there.
``TRAINERS_SEEDS=3:4 python -m nox -s trainers -- -k sft`` replays a fault that has been drawn at random.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import re
from pathlib import Path

import pytest

from tests.support.observed import assert_same, assert_same_steps, files, observed, run_observed, samples
from tests.trainers.cases import CASES
from tests.trainers.page import FAULTS, UNDISTURBED

SCRIPTS = Path(__file__).with_name("scripts")
FIRST, LAST = (int(number) for number in os.environ.get("TRAINERS_SEEDS", "0:1").split(":"))
CHOSEN = os.environ.get("TRAINERS", "")
"""Script of the cases to run, or "all"; the quick ones without it."""
MODULES = {"pytorch-ignite": "ignite", "torch-geometric": "torch_geometric"}
CONSEQUENCE = re.compile(
    r"does not use the elastic session|among the ranks|not divide|not restored|trains without|A defect of"
)
"""What messages of this library say where something does not hold."""


def cases():
    """Return the cases to run, those of a script in one process."""
    for case in CASES:
        script = case.script.split()[0]
        there = importlib.util.find_spec(MODULES.get(case.library, case.library.replace("-", "_"))) is not None
        chosen = (
            case.library != "deepspeed" if CHOSEN == "all" else there and (script == CHOSEN if CHOSEN else case.quick)
        )
        if chosen:
            yield pytest.param(case, id=case.id, marks=pytest.mark.xdist_group(script))


SELECTED = list(cases())


def run(case, folder, *more, **options):
    name, *arguments = case.script.split()
    script = SCRIPTS / f"{name}_script.py"
    imports = script if case.preloaded else SCRIPTS / "offline.py"
    return run_observed(script, folder, *arguments, *more, imports=imports, **options)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Return the run of a case without faults, once for each: ``undisturbed(case)``."""

    @functools.cache
    def start(name):
        (case,) = (case for case in CASES if case.id == name)
        return run(case, tmp_path_factory.mktemp("two_nodes") / "run", "--pause", "0", nodes=(2, 2))

    return lambda case: start(case.id)


@pytest.fixture(autouse=True)
def found(request, record_property):
    """Name the case and what is done with it for the page."""
    case = request.node.callspec.params["case"]
    record_property("case", case.id)
    faults = "seed" in request.node.callspec.params
    record_property("what", FAULTS if faults else UNDISTURBED)
    if not case.holds(faults=faults):
        request.applymarker(pytest.mark.xfail(reason=case.fails, strict=True))


def messages(run):
    """Return the lines of the workers' logs that say that something does not hold."""
    logs = (run.folder.parent / "run" / "workers").rglob("stderr.log")
    return {line for log in logs for line in log.read_text().splitlines() if CONSEQUENCE.search(line)}


def assert_says(case, run):
    """Check that the log names what does not hold, and nothing else."""
    lines = messages(run)
    assert [line for line in lines if not case.says or case.says not in line] == []
    assert bool(lines) == bool(case.says)


def completed(steps):
    """Return how often each sample was trained."""
    return sum((samples(lines) for lines in steps.values()), start=samples([]))


@pytest.mark.parametrize("case", SELECTED)
def test_a_trainer_trains_each_sample_on_two_nodes(undisturbed, case):
    run = undisturbed(case)
    steps = observed(run)
    assert run.record.get("completed_steps", case.steps) == case.steps
    if case.session:
        assert_says(case, run)
    if case.searches or not case.session:
        return
    assert len(steps) == case.steps
    if case.epochs is not None:
        assert set(completed(steps).values()) == {case.epochs}


@pytest.mark.parametrize("seed", range(FIRST, LAST))
@pytest.mark.parametrize("case", SELECTED)
def test_a_trainer_trains_under_faults_as_without(tmp_path, undisturbed, case, seed, record_property):
    draw = random.Random(f"{case.id} {seed}")
    expected = undisturbed(case)
    if not case.session:
        first = draw.uniform(1.5, 2.5)
        chaos = f"kill=rank0@{first:.1f}s,add@{first + draw.uniform(0.5, 2):.1f}s"
        found = run(case, tmp_path / "run", "--full", "2", "--pause", "0.12", nodes=(1, 2), chaos=chaos)
        assert found.record == expected.record, chaos
        assert files(found) == files(expected), chaos
        return
    first = draw.randint(case.after, max(case.after, case.steps // 2))
    chaos = f"{draw.choice(['kill', 'kill', 'preempt'])}={draw.choice(['rank0', 'any'])}@step:{first}"
    chaos += f",add@step:{first + draw.randint(2, 6)}"
    record_property("faults", chaos)
    found = run(case, tmp_path / "run", "--full", "2", nodes=(1, 2), chaos=chaos)
    trail = f"{chaos}; files in {found.folder.parent}"
    assert not found.report.missed_faults, trail
    assert found.report.audit.rolled_back_steps == 0 or case.sharded, trail
    assert found.report.last_step == expected.report.last_step, trail
    kept = found.record.keys() - set(case.ignored)
    assert_same({name: found.record[name] for name in kept}, {name: expected.record[name] for name in kept}, case.close)
    if not case.searches:
        assert_trained_as(observed(found), observed(expected), case)
    assert files(found) == files(expected), trail
    assert_says(case, found)


def assert_trained_as(found, expected, case):
    """Compare each step; where weights depend on the ranks, its learning rate."""
    if case.weights is not None:
        assert_same_steps(found, expected, case.weights)
        return
    assert found.keys() == expected.keys()
    for key, lines in found.items():
        rates = [line["rate"] for line in lines]
        assert rates == pytest.approx([expected[key][0]["rate"]] * len(rates), abs=1e-12), key
