"""Stock scripts of Lightning's ``Trainer``, which do not mention this library, in elastic runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.stacks import (
    FAULTS,
    assert_same_rates,
    assert_weights_do_not_depend_on_the_world_size,
    recorded,
    run_stock,
)

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

pytestmark = pytest.mark.xdist_group("lightning")

SCRIPT = Path(__file__).with_name("lightning_script.py")
EPOCHS, SAMPLES = 3, 1000
STEPS = EPOCHS * 42  # windows of 24 samples
VALIDATIONS = [[0, 42], [1, 84], [2, STEPS]]


def rates(run):
    """Return the learning rate of each step; one that a lost node has interrupted is begun twice."""
    return dict(run.record["rates"])


def test_each_sample_is_trained_once_an_epoch(undisturbed):
    assert undisturbed.report.audit.complete, undisturbed.report.audit
    counts = Counter(index for each in recorded(undisturbed) for index in each.get("seen", ()))
    assert set(counts) == set(range(SAMPLES))
    assert set(counts.values()) == {EPOCHS}
    assert undisturbed.record["steps"] == STEPS
    assert undisturbed.record["timeout"] == 7200
    assert undisturbed.output.count("Lightning evaluates 2 of 100 samples twice") == 1
    assert rates(undisturbed) == pytest.approx({step: 1e-2 * (1 - step / STEPS) for step in range(STEPS)})


def test_a_run_with_faults_is_the_same_training(run_script, tmp_path, undisturbed):
    run = run_script(tmp_path / "run", chaos=FAULTS)
    run.require_faults()
    assert (run.record["steps"], run.record["epoch"]) == (STEPS, EPOCHS)
    assert_same_rates(rates(run), rates(undisturbed))
    assert run.record["validated"] == VALIDATIONS
    assert run.record["loss"] == pytest.approx(undisturbed.record["loss"], abs=0.05)


def test_a_node_is_lost_after_the_last_step_of_an_epoch(run_script, tmp_path):
    run = run_script(tmp_path / "run", nodes=(1, 2), chaos="kill=rank0@step:63")
    run.require_whole()
    assert (run.record["steps"], run.record["epoch"]) == (EPOCHS * 63, EPOCHS)


def test_weights_do_not_depend_on_the_world_size(run_script, tmp_path):
    """Shares of unequal size and ranks without samples count by their samples; without accumulation: see sharded."""
    assert_weights_do_not_depend_on_the_world_size(run_script, tmp_path, "--accumulate", "2")


def test_workers_that_no_preload_server_forks(tmp_path):
    """With the package's other name, whose modules are attached to by the same functions."""
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text().replace("import lightning.pytorch as pl", "import pytorch_lightning as pl"))
    options = {"preload": False, "imports": SCRIPT, "nodes": (1, 1)}
    run = run_stock(script, tmp_path / "run", "--pause", "0", "--epochs", "1", **options)
    assert run.report.audit.complete, run.report.audit
    assert run.record["steps"] == 125
