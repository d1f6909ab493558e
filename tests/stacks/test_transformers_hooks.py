"""What belongs to a step of ``Trainer`` is done once, and evaluations have one result at any world size."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers")

SCRIPT = Path(__file__).with_name("trainer_hooks_script.py")
IMPORTS = Path(__file__).with_name("trainer_script.py")
NODES = (2, 2)


def require_equal(found, expected):
    """Compare records; numbers differ by rounding where the world size differs."""
    assert found["places"] == expected["places"]
    for name in ("best_model", "kept", "steps"):
        assert found[name] == expected[name], name
    for name in ("best", "loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    assert len(found["log"]) == len(expected["log"])
    for line, other in zip(found["log"], expected["log"], strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_evaluations_do_not_depend_on_the_world_size(run_script, tmp_path):
    """Of models whose loss ignores the number of labels, and those which divide by it; the batches are uneven.

    Where their order is random, it is that of rank 0: no sample is left out.
    """
    runs = [run_script(tmp_path / str(n), "--evaluate", nodes=(n, n)).record["evaluations"] for n in (1, 2, 3)]
    for run in runs[1:]:
        for (numbers, shapes), (expected, other) in zip(run, runs[0], strict=True):
            assert numbers == pytest.approx(expected, rel=1e-5)
            assert shapes == other


def test_a_worker_is_lost_after_a_step_is_complete(run_script, tmp_path, undisturbed):
    """Before the step's callbacks and its line in the log; before and after an evaluation is known to be complete."""
    places = [("step", "4"), ("log", "12"), ("evaluation", "16"), ("save", "24")]
    deaths = [word for place in places for word in ("--die", *place)]
    run = run_script(tmp_path / "run", *deaths, nodes=NODES, max_restarts=len(places))
    run.require_whole()
    assert len(run.report.rounds) == 1 + len(places)
    require_equal(run.record, undisturbed.record)


def test_a_node_is_lost(run_script, tmp_path, undisturbed):
    run = run_script(tmp_path / "run", "--pause", "0.1", nodes=(1, 2), chaos="kill=rank0@step:12")
    assert not run.report.missed_faults
    run.require_whole()
    require_equal(run.record, undisturbed.record)


def test_losses_that_are_not_logged_yet_are_not_lost(run_script, tmp_path):
    """Nor is the evaluation at the end that max_steps makes within an epoch."""
    options = ("--logging-steps", "7", "--max-steps", "20")
    deaths = ("--die", "step", "12", "--die", "evaluation", "20")
    undisturbed, run = (
        run_script(tmp_path / name, *options, *die, nodes=NODES).record
        for name, die in (("undisturbed", ()), ("run", deaths))
    )
    require_equal(run, undisturbed)
