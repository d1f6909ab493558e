"""Loops with accelerate in the order of samplers and batch samplers of the script's own: that of one process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler

from tests.stacks import accelerate_sampled_script as stock

pytest.importorskip("accelerate")

pytestmark = pytest.mark.xdist_group("accelerate")

SCRIPT = Path(stock.__file__)
IMPORTS = Path(__file__).with_name("accelerate_script.py")
RANKS = 2


def windows(kind):
    """Yield the samples of each step of a run with all nodes, by epoch, as the sampler draws them."""
    loader = stock.make_loader(kind, stock.sequences())
    sampler = loader.batch_sampler
    for epoch in range(stock.EPOCHS):
        if kind == "buckets":
            sampler.set_epoch(epoch)
            batches = list(sampler)
        else:
            batches = list(BatchSampler(sampler.sampler, stock.BATCH, drop_last=False))
        for begin in range(0, len(batches), RANKS):
            yield epoch, [index for batch in batches[begin : begin + RANKS] for index in batch]


def trained_alone(kind):
    """Return the weights that one process trains with these steps, each by the mean over its samples."""
    data, model = stock.sequences(), stock.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    steps = list(windows(kind))
    for number, (_, window) in enumerate(steps, 1):
        optimizer.zero_grad()
        stock.loss_of(model, stock.collate([data[index] for index in window])).backward()
        optimizer.step()
        if number % (len(steps) // stock.EPOCHS) == 0:
            scheduler.step(stock.evaluated(model, data))
    return model.layer.weight.flatten().tolist()


def assert_is_the_same_training(run, kind):
    run.require_whole()
    steps = list(windows(kind))
    assert run.record["steps"] == run.report.last_step == len(steps)
    assert run.record["length"] == len(steps) // stock.EPOCHS
    assert run.record["samples"] == sum(len(window) for _, window in steps)
    assert run.record["weights"] == pytest.approx(trained_alone(kind), abs=1e-5)
    assert "does not divide" not in run.output


@pytest.mark.parametrize("kind", ["buckets", "replacement"])  # the others: below, also with all nodes at first
def test_the_training_is_that_of_one_process(run_script, tmp_path, kind):
    run = run_script(tmp_path / "run", "--kind", kind, nodes=(RANKS, RANKS))
    assert_is_the_same_training(run, kind)
    found = Counter()
    for file in run.folder.glob("seen.*"):
        for step, ids in map(json.loads, file.read_text().splitlines()):
            found.update((step, index) for index in ids)
    assert found == Counter((step, index) for step, (_, ids) in enumerate(windows(kind), 1) for index in ids)


@pytest.mark.parametrize("kind", ["weighted", "seeded", "buckets", "subset"])
def test_a_loss_in_the_last_epoch_changes_nothing(run_script, tmp_path, kind):
    """With one node the batches of a rank are larger; those of a batch sampler are put together.

    Epochs that are repeated are evaluated with the present weights, which is said: but the scheduler that follows the
    evaluations, unknown to accelerate, goes on from what they were.
    """
    steps = len(list(windows(kind)))
    faults = f"kill=rank0@step:{steps * 5 // 6}"
    run = run_script(tmp_path / "run", "--kind", kind, "--pause", "0.05", nodes=(1, RANKS), chaos=faults)
    assert run.report.world_sizes == (2, 1)
    assert not run.report.missed_faults
    assert_is_the_same_training(run, kind)
    assert "The script evaluates in steps and epochs that it repeats: with the present weights" in run.output
