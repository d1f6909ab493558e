"""Stock loops with ``accelerate.Accelerator``, which do not mention this library, in elastic runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from azureml_elastic.checkpoint.format import catalogue
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.config import FixedGlobalBatch
from azureml_elastic.ledger.events import WorkersStarted
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from tests.support.stacks import (
    FAULTS,
    assert_same_rates,
    assert_weights_do_not_depend_on_the_world_size,
    recorded,
    run_stock,
    seen,
)

pytest.importorskip("accelerate")

pytestmark = pytest.mark.xdist_group("accelerate")

SCRIPT = Path(__file__).with_name("accelerate_script.py")
EPOCHS, SAMPLES = 3, 1000
STEPS = EPOCHS * 42  # windows of 24 samples


def rates(run):
    """Return the learning rates after the steps, each of which is lower than the one before it."""
    return by_value(line["rate"] for line in recorded(run) if "rate" in line)


def by_value(rates):
    return {round(rate, 8): rate for rate in rates}


def schedule(steps, total):
    """Return the learning rates after the steps of a linear decay that advances three times a step."""
    return by_value(1e-2 * max(0.0, 1 - 3 * step / total) for step in range(1, steps + 1))


def test_each_sample_is_trained_once_an_epoch(undisturbed):
    assert undisturbed.report.audit.complete, undisturbed.report.audit
    for counts in seen(undisturbed).values():
        assert counts == dict.fromkeys(range(SAMPLES), 1)


def test_the_schedule_is_that_of_a_run_without_this_library(undisturbed):
    """A scheduler advances three times a step on three nodes, as accelerate has it."""
    assert rates(undisturbed) == pytest.approx(schedule(STEPS, EPOCHS * 125), abs=1e-9)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_with_faults_is_the_same_training(run_script, tmp_path, undisturbed, resumes):
    """So it is with a script that continues from the folders of its own, and with one that begins anew."""
    run = run_script(tmp_path / "run", "--pause", "0.08", *(["--resume"] if resumes else []), chaos=FAULTS)
    run.require_faults()
    assert run.report.last_step == STEPS
    assert_same_rates(rates(run), rates(undisturbed))
    assert run.record["completed_steps"] == STEPS  # a counter of the script's own
    for counts in seen(run).values():
        assert set(counts) == set(range(SAMPLES))
    assert set(run.record["accuracies"].values()) <= {share / 100 for share in range(90, 101)}


def test_a_worker_is_lost_in_an_evaluation(run_script, tmp_path, undisturbed):
    run = run_script(tmp_path / "run", "--pause", "0", "--die-in-evaluation")
    run.require_whole()
    restored = Picture.of(read_events(run.report.paths.run_dir / "events")).restored
    assert list(restored.values()) == [0, STEPS // 3]
    repeated = [line for line in run.output.splitlines() if "trained already" in line]
    assert len(repeated) == 1
    assert f"The script counts {STEPS // 3} steps that are trained already." in repeated[0]
    assert_same_rates(rates(run), rates(undisturbed))
    assert set(run.record["accuracies"]) == {"0", "1", "2"}


@pytest.mark.parametrize("end", ["end_training", "destroy_process_group", "exit", "del"])
def test_the_last_step_counts_however_the_script_ends(tmp_path, end):
    """Within its loop, on one node of one process, whose process group nothing but the session needs."""
    script = SCRIPT.with_name("ending_script.py")
    run = run_stock(script, tmp_path / "run", "--end", end, nodes=(1, 1), imports=SCRIPT)
    assert run.report.last_step == 5
    assert len(run.report.rounds) == 1
    storage = open_storage(run.report.paths.run_dir / "checkpoints")
    newest = catalogue.newest_whole(storage)
    assert newest.step == 5
    catalogue.export(storage, newest, "model", tmp_path / "weights")
    torch.testing.assert_close(load_file(tmp_path / "weights")["weight"], torch.tensor(run.record))


def test_nodes_that_their_command_starts(tmp_path):
    faults = {"nodes": (1, 2), "chaos": "kill=rank0@step:33"}
    run = run_stock(SCRIPT, tmp_path / "run", "--pause", "0", start="command", **faults)
    assert run.report.audit.complete, run.report.audit
    assert run.report.last_step == EPOCHS * 63


def test_workers_that_no_preload_server_forks(run_script, tmp_path):
    run = run_script(tmp_path / "run", "--pause", "0", "--epochs", "1", preload=False, nodes=(1, 1))
    assert run.report.audit.complete, run.report.audit
    assert run.report.last_step == 125


def test_in_process_recovery_falls_back_to_a_restart(run_script, tmp_path):
    """A stack has no session that could go on, which is said; for all stacks ``keeps_processes`` decides."""
    run = run_script(tmp_path / "run", recovery="in_process", nodes=(1, 2), chaos="kill=rank0@step:33")
    run.require_whole()
    assert not run.report.missed_faults
    events = read_events(run.report.paths.events)
    started = [(event.node, event.pids) for event in events if isinstance(event, WorkersStarted)]
    assert len(set(started)) == len(started) > len(run.report.nodes), "no worker stays over a round"
    said = [
        line
        for line in run.output.splitlines()
        if f"keeps no process of {SCRIPT}, which opens no session of its own" in line
    ]
    assert len(said) == len(run.report.nodes)


@pytest.mark.parametrize("style", [[], ["--by-hand"]], ids=["accumulate", "by hand"])
def test_accumulated_gradients(run_script, tmp_path, style):
    run = run_script(tmp_path / "run", "--accumulate", "2", "--epochs", "5", *style, chaos=FAULTS)
    run.require_whole()
    assert run.report.last_step == 5 * 21
    assert_same_rates(rates(run), schedule(5 * 21, 5 * 125 // 2))


def test_weights_do_not_depend_on_the_world_size(run_script, tmp_path):
    """Shares of unequal size and ranks without samples count by their samples; without accumulation: see sharded."""
    assert_weights_do_not_depend_on_the_world_size(run_script, tmp_path, "--accumulate", "2")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("iterable", "the samples of Stream have no index"),
        ("dispatch", "dispatch_batches=True has rank 0 read all data"),
        ("second", "another loader is the one of the training"),
        ("local", "LocalSGD trains each rank by itself"),
        ("again", "the run neither saves nor restores it: after a change of the nodes it begins anew"),
    ],
)
def test_data_that_are_left_to_accelerate_are_named_once_they_are_trained(tmp_path, kind, reason):
    """And an evaluation's are not."""
    run = run_left(tmp_path, kind)
    warnings = [line for line in run.output.splitlines() if "does not divide among the ranks" in line]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert run.record == {"steps": 4, "seen": 16}


def test_two_iterations_at_once_are_named_and_each_has_its_batches(tmp_path):
    run = run_left(tmp_path, "twice")
    warnings = [line for line in run.output.splitlines() if "after it has begun another" in line]
    assert len(warnings) == 1
    assert "training them is not counted" in warnings[0]
    assert run.record == {"steps": 4, "seen": 16}


def test_what_a_script_is_given_has_the_attributes_of_accelerates_own(tmp_path):
    """As it would be with all ranks that the batch sizes are meant for, of which two are there."""
    script = SCRIPT.with_name("accelerate_attributes_script.py")
    three = FixedGlobalBatch(logical_workers=3)
    record = run_stock(script, tmp_path / "run", nodes=(2, 2), imports=SCRIPT, batch=three).record
    for data in ("train", "evaluation"):
        assert record[data] == {"missing": [], "values": {}, "known": True, "same": [True] * 3}
    assert record["epochs"] == [0, 1]
    assert record["positions"] == [[epoch, last, 4] for epoch in range(2) for last in (False, False, True)]
    assert not record["drawn"]
    assert record["timeout"] == 7200


def test_a_loss_that_the_script_may_have_weighed_is_named_where_that_matters(tmp_path):
    """Ranks have 5 and 4 of 9 samples, and the script reads the number of ranks within a step."""
    run = run_left(tmp_path, "ranks", batch=FixedGlobalBatch(logical_workers=3))
    said = [
        line for line in run.output.splitlines() if "accelerator.num_processes was read between a batch and its" in line
    ]
    assert len(said) == 1


def test_steps_count_whose_loss_goes_backward_past_accelerate(tmp_path):
    run = run_left(tmp_path, "plain")
    assert run.report.audit.complete
    assert run.report.last_step == run.record["steps"] == 4
    assert len([line for line in run.output.splitlines() if "steps without accelerator.backward(loss)" in line]) == 1


def run_left(folder, kind, **options):
    script = SCRIPT.with_name("accelerate_left_script.py")
    return run_stock(script, folder / "run", "--kind", kind, nodes=(2, 2), imports=SCRIPT, **options)
