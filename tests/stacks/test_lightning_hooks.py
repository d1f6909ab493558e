"""What belongs to a step of Lightning is done once: hooks, validation, the epoch's end, metrics and their followers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")

pytestmark = pytest.mark.xdist_group("lightning")

SCRIPT = Path(__file__).with_name("lightning_hooks_script.py")
IMPORTS = Path(__file__).with_name("lightning_script.py")
NODES = (2, 2)


def require_equal(found, expected):
    """Compare records; the places of a run that lost a node may include one that was interrupted and done again."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        approximate = name in ("rates", "val_loss", "best_score", "seen")
        assert found[name] == (pytest.approx(value, rel=1e-4) if approximate else value), name


def test_a_group_of_the_scripts_own_is_elastic(undisturbed):
    assert undisturbed.report.audit.complete, undisturbed.report.audit
    record = undisturbed.record
    assert record["stopped"], "the example stops early"
    assert min(record["rates"].values()) < 0.2, "its learning rate falls"
    assert set(record["seen"]) == {64.0}


def test_a_worker_is_lost_after_a_step_is_complete(run_script, tmp_path, undisturbed):
    """In a hook, in the one of an epoch's last step, in a validation, and at an epoch's end."""
    places = [("hook", "2"), ("hook", "8"), ("validation", "2"), ("epoch", "3")]
    deaths = [word for place in places for word in ("--die", *place)]
    run = run_script(tmp_path / "run", *deaths, nodes=NODES, max_restarts=len(places))
    run.require_whole()
    assert len(run.report.rounds) == 1 + len(places)
    require_equal(run.record, undisturbed.record)
    assert "Watch.on_train_batch_end() was run again" in run.output
    assert "on_train_batch_end() was run again" not in run.output.replace("Watch.on_train_batch_end", "")


def test_a_worker_is_lost_at_the_end_that_max_steps_makes(run_script, tmp_path):
    runs = [
        run_script(tmp_path / name, "--max-steps", "6", *die, nodes=NODES)
        for name, die in (("undisturbed", ()), ("run", ("--die", "epoch", "1")))
    ]
    assert len(runs[1].report.rounds) == 2
    require_equal(runs[1].record, runs[0].record)


def test_a_node_is_lost(run_script, tmp_path, undisturbed):
    """One node does the rest, with two batches for each of the script's."""
    run = run_script(tmp_path / "run", "--pause", "0.1", nodes=(1, 2), chaos="kill=rank0@step:6")
    assert not run.report.missed_faults
    run.require_whole()
    places = run.record.pop("places")
    assert places.keys() == undisturbed.record["places"].keys()
    require_equal(run.record, {name: value for name, value in undisturbed.record.items() if name != "places"})
    assert "GPU available" in run.output, "Lightning's messages are there"
    for warning in ("not resumable", "not empty", "dirpath has changed"):
        assert warning not in run.output
