"""Subclasses of ``Trainer`` that override what the integration depends on: loaders and checkpoints of their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers")

SCRIPT = Path(__file__).with_name("own_trainer_script.py")
IMPORTS = Path(__file__).with_name("trainer_script.py")
SAMPLES, BATCH, STEPS = 160, 4, 40
LOSS = {"nodes": (1, 2), "chaos": "kill=rank0@step:12"}


def batches(run):
    """Return the batches that were trained, those of a step that was interrupted once."""
    files = [map(json.loads, file.read_text().splitlines()) for file in run.folder.glob("seen.*")]
    return sorted({(step, tuple(ids)) for lines in files for step, ids in lines})


def assert_is_the_same_training(run, steps=STEPS):
    assert run.record["steps"] == steps
    rates = dict(run.curve("learning_rate"))
    # transformers logs the rate with which a step was taken; one line may be lost with rank 0.
    assert len(rates) >= steps - 1
    assert rates == pytest.approx({step: 0.01 * (steps + 1 - step) / steps for step in rates}, abs=1e-9)
    assert run.report.world_sizes == (2, 1)


def weighted_ids(epochs=2):
    weights = [1.0 + i % 3 for i in range(SAMPLES)]
    sampler = WeightedRandomSampler(weights, SAMPLES, generator=torch.Generator().manual_seed(0))
    return [list(sampler) for _ in range(epochs)]


def test_the_order_of_a_sampler_is_trained_once_an_epoch(run_script, tmp_path):
    """It is the order which the sampler would draw with all nodes, also in the epoch in which one is lost."""
    run = run_script(tmp_path / "run", "--loader", "weighted", **LOSS)
    assert_is_the_same_training(run)
    run.require_whole()
    seen, size = batches(run), 2 * BATCH
    order = [index for epoch in weighted_ids() for index in epoch]
    for step in range(STEPS):
        assert Counter(index for at, ids in seen if at == step for index in ids) == Counter(
            order[step * size : (step + 1) * size]
        )


def test_batches_of_a_batch_sampler_stay_whole(run_script, tmp_path):
    run = run_script(tmp_path / "run", "--loader", "batches", **LOSS)
    assert_is_the_same_training(run)
    run.require_whole()
    seen = batches(run)
    assert all(len(ids) == BATCH and len({index % 2 for index in ids}) == 1 for _, ids in seen)
    for epoch in range(2):
        counts = Counter(index for step, ids in seen if step // (STEPS // 2) == epoch for index in ids)
        assert counts == Counter(range(SAMPLES))


def test_a_trainer_that_collects_batches_is_given_as_many_in_each_step(run_script, tmp_path):
    """Its sizes are those of a run with all nodes, too: what it computes by the number of ranks."""
    run = run_script(tmp_path / "run", "--loader", "counted", **LOSS)
    assert_is_the_same_training(run, steps=STEPS // 2)
    block = 4 * BATCH
    for step in range(STEPS // 2):
        begin = step * block % SAMPLES
        # A step that was interrupted has two divisions of its block.
        assert {index for at, ids in batches(run) if at == step for index in ids} == {*range(begin, begin + block)}


def test_a_loader_that_nothing_divides_is_divided_and_said(run_script, tmp_path):
    run = run_script(tmp_path / "run", "--loader", "plain", **LOSS)
    assert_is_the_same_training(run)
    run.require_whole()
    assert "Own.get_train_dataloader() returns a loader of which each rank would train all samples" in run.output


@pytest.mark.parametrize(
    ("loader", "reason"), [("iterable", "the samples of Stream have no index"), ("foreign", "the loader is a Foreign")]
)
def test_data_that_the_stack_divides_keep_steps_rates_and_position(run_script, tmp_path, loader, reason):
    run = run_script(tmp_path / "run", "--loader", loader, **LOSS)
    assert_is_the_same_training(run)
    assert f"transformers divides the training data among the ranks: {reason}." in run.output
    seen = batches(run)
    for epoch in range(2):
        counts = Counter(index for step, ids in seen if step // (STEPS // 2) == epoch for index in ids)
        assert counts == Counter(range(SAMPLES))


def test_a_loop_that_is_none_of_the_stacks_is_said(run_script, tmp_path):
    run = run_script(tmp_path / "run", "--loader", "loop", nodes=(1, 1))
    assert run.record["steps"] == SAMPLES // BATCH
    assert "A loop that is not that of Trainer.train() trains with the trainer's accelerator" in run.output
