"""Stock scripts with a DeepSpeed engine, which do not mention this library, in elastic runs.

They need DeepSpeed, which the other tests do without: ``python -m nox -s deepspeed`` installs it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from azureml_elastic.config import CheckpointPolicy
from tests.support.stacks import (
    FAULTS,
    assert_same_rates,
    assert_weights_do_not_depend_on_the_world_size,
    run_stock,
    seen,
)

if "DEEPSPEED_TESTS" not in os.environ:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("deepspeed_script.py")
TRAINER = SCRIPT.with_name("trainer_script.py")
UNDER_OTHERS = pytest.mark.xdist_group("DeepSpeed under other stacks")  # for whose nodes there is one server
EPOCHS, SAMPLES = 3, 1000
STEPS = EPOCHS * 42  # windows of 24 samples


def test_each_sample_is_trained_once_an_epoch(undisturbed):
    assert undisturbed.report.audit.complete, undisturbed.report.audit
    for counts in seen(undisturbed).values():
        assert counts == dict.fromkeys(range(SAMPLES), 1)
    assert undisturbed.record["global_steps"] == STEPS


@pytest.mark.parametrize(
    ("stage", "loader"),
    [("2", []), ("3", []), ("2", ["--own-loader"])],
    ids=["ZeRO 2", "ZeRO 3", "loader of the script"],
)
def test_a_run_with_faults_is_the_same_training(run_script, tmp_path, undisturbed, stage, loader):
    """Each rank holds a part of the state: what was trained since the last snapshot in memory is trained again."""
    run = run_script(
        tmp_path / "run",
        "--stage",
        stage,
        *loader,
        "--pause",
        "0.08",
        chaos=FAULTS,
        checkpoint=CheckpointPolicy(snapshot_every_steps=1),
    )
    run.require_faults(most_repeated=5)
    assert run.record["global_steps"] == STEPS
    assert_same_rates(dict(run.record["rates"]), dict(undisturbed.record["rates"]))
    assert run.record["loss"] == pytest.approx(undisturbed.record["loss"], abs=0.05)


@UNDER_OTHERS
def test_trainer_with_a_deepspeed_configuration(tmp_path):
    """Without snapshots in memory a lost node's run continues from the newest folder of the script."""
    faults, steps = "kill=rank0@step:25,add@step:45", 84
    run = run_stock(TRAINER, tmp_path / "run", "--zero", "3", "--epochs", "2", chaos=faults)
    run.require_whole(most_repeated=20)
    assert not run.report.missed_faults
    assert run.record["max_steps"] == steps
    rates = {step: 1e-3 * (1 - step / steps) for step in range(1, steps + 1)}
    assert_same_rates(dict(run.curve("learning_rate")), rates)
    assert [step for step, _ in run.curve("eval_loss")] == [steps // 2, steps]


@UNDER_OTHERS
def test_accelerate_with_a_deepspeed_plugin(tmp_path):
    script = SCRIPT.with_name("accelerate_script.py")
    run = run_stock(
        script,
        tmp_path / "run",
        "--zero",
        "2",
        "--resume",
        "--pause",
        "0.08",
        chaos=FAULTS,
        checkpoint=CheckpointPolicy(snapshot_every_steps=1),
        imports=TRAINER,
    )
    run.require_whole(most_repeated=5)
    assert not run.report.missed_faults
    assert (run.report.last_step, run.record["completed_steps"]) == (STEPS, STEPS)


@pytest.mark.parametrize("skip", [[], ["--skip"]], ids=["", "passing over batches"])
def test_a_script_that_continues_from_folders_of_its_own(run_script, tmp_path, undisturbed, skip):
    """A run of another stage continues from the folders of the first one; a lost node changes no counter."""
    folders = tmp_path / "folders"
    options = ("--resume", str(folders), "--save-every", "14", "--pause", "0", *skip)
    first = run_script(tmp_path / "first", *options, "--epochs", "1", nodes=(3, 3))
    assert (first.record["steps"], first.record["global_steps"]) == (42, 42)
    assert (folders / "latest").read_text() == "global_step42"
    faults = {"chaos": "kill=rank0@step:64", "checkpoint": CheckpointPolicy(snapshot_every_steps=1)}
    run = run_script(tmp_path / "second", *options, "--stage", "3", **faults)
    assert run.report.rounds[0].restored_step == 42
    assert (run.record["steps"], run.record["global_steps"]) == (STEPS, STEPS)
    assert run.record["loss"] == pytest.approx(undisturbed.record["loss"], abs=0.05)
    counts = seen(run)
    assert set(counts) == {1, 2}
    assert all(set(each) == set(range(SAMPLES)) for each in counts.values())


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_weights_do_not_depend_on_the_world_size(run_script, tmp_path, accumulate):
    """Shares of unequal size and ranks without samples count by their samples."""
    assert_weights_do_not_depend_on_the_world_size(run_script, tmp_path, "--accumulate", accumulate)


def test_workers_that_no_preload_server_forks(run_script, tmp_path):
    run = run_script(tmp_path / "run", "--pause", "0", "--epochs", "1", preload=False, nodes=(1, 1))
    assert run.report.audit.complete, run.report.audit
    assert run.report.last_step == 125
