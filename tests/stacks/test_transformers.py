"""Stock scripts of ``transformers.Trainer``, which do not mention this library, in elastic runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.stacks import FAULTS, assert_same_rates, assert_weights_do_not_depend_on_the_world_size

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers")

SCRIPT = Path(__file__).with_name("trainer_script.py")
EPOCHS, SAMPLES = 3, 1000
STEPS = EPOCHS * 42  # windows of 24 samples


def seen(run):
    """Return how often each sample was given to the model."""
    lines = (line for file in run.folder.glob("seen.*") for line in file.read_text().splitlines())
    return Counter(index for line in lines for index in json.loads(line))


def test_each_sample_is_trained_once_an_epoch(undisturbed):
    assert undisturbed.report.audit.complete, undisturbed.report.audit
    assert undisturbed.record["max_steps"] == STEPS
    assert undisturbed.record["timeout"] == 7200
    counts = seen(undisturbed)
    assert set(counts) == set(range(SAMPLES))
    # A rank without samples of its own in the last window takes some of it, with a weight of 0.
    assert set(counts.values()) == {EPOCHS}


def test_a_run_with_faults_is_the_same_training(run_script, tmp_path, undisturbed):
    run = run_script(tmp_path / "run", chaos=FAULTS)
    run.require_faults()
    assert run.record["max_steps"] == STEPS
    rates = run.curve("learning_rate")
    assert_same_rates(dict(rates), dict(undisturbed.curve("learning_rate")))
    assert len(dict(rates)) == len(rates)
    assert [step for step, _ in run.curve("eval_loss")] == [STEPS // 3, STEPS // 3 * 2, STEPS]
    assert run.record["loss"] == pytest.approx(undisturbed.record["loss"], rel=0.05)


@pytest.mark.parametrize(("accumulate", "loss"), [("2", "ignored"), ("2", "divided")])
def test_weights_do_not_depend_on_the_world_size(run_script, tmp_path, accumulate, loss):
    """Shares of unequal size and ranks without samples count by their samples or labels."""
    assert_weights_do_not_depend_on_the_world_size(run_script, tmp_path, "--accumulate", accumulate, "--loss", loss)


def test_workers_that_no_preload_server_forks(run_script, tmp_path):
    run = run_script(tmp_path / "run", "--pause", "0", "--epochs", "1", preload=False, nodes=(1, 1))
    assert run.report.audit.complete, run.report.audit
    assert run.record["max_steps"] == 125


def test_the_integration_can_be_switched_off(run_script, tmp_path, monkeypatch):
    """For all stacks by the same variable; see ``tests/unit/forks/test_stack_imports.py``."""
    monkeypatch.setenv("AZUREML_ELASTIC_INTEGRATIONS", "off")
    run = run_script(tmp_path / "run", "--pause", "0", "--epochs", "1", nodes=(2, 2))
    assert run.report.audit is None
    assert max(seen(run).values()) > 1  # the last samples of an epoch repeat its first ones
