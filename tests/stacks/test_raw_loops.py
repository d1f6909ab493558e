"""A loop in the shape of nanoGPT, with three lines of this library, under faults."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED
from tests.support.paths import ROOT, SAMPLES
from tests.support.whole_runs import GATHERING

STEPS = 80
FAULTS = "kill=rank0@step:12,add@step:20,preempt=any@step:50"
SAMPLE = SAMPLES / "char_gpt.py"
PAGE = (ROOT / "docs/how-to/stacks/index.md").read_text()
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


def train(folder: Path, *options: str, **cluster) -> Report:
    """Run the sample under faults to its end."""
    made = LocalCluster(
        (1, 2),
        start=FORKED,
        chaos=parse_schedule(FAULTS),
        run_dir=folder / "run",
        timeout=150,
        rendezvous=GATHERING,
        **cluster,
    )
    # The node that comes after a step is a member long before another one gets its notice, also on a busy machine.
    small = ("--max-iters", str(STEPS), "--batch-size", "4", "--pause", "0.06")
    report = made.run([sys.executable, str(SAMPLE), *small, *options])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert not report.missed_faults
    assert len(report.world_sizes) > 2
    assert report.rounds[-1].last_step == STEPS
    return report


def trained_again(report: Report) -> list[tuple[str, int]]:
    """Return the reason of each round's end, and the number of steps that were trained a second time after it.

    The number is negative where the restored step was completed, but not reported.
    """
    return [(before.reason, before.last_step - after.restored_step) for before, after in pairwise(report.rounds)]


def test_a_loop_that_draws_at_random_never_repeats_its_draws(tmp_path):
    draws = tmp_path / "draws"
    draws.mkdir()
    report = train(tmp_path, "--draws", str(draws))
    assert all(steps <= 0 for _, steps in trained_again(report)), "no step is lost"
    drawn = [line for file in draws.iterdir() for line in file.read_text().splitlines()]
    assert len(drawn) >= STEPS
    assert len(set(drawn)) == len(drawn)


@pytest.mark.shards_on_cpus
def test_a_sharded_loop_continues_from_its_last_snapshot(tmp_path):
    report = train(tmp_path, "--shard", checkpoint=CheckpointPolicy(snapshot_every_steps=1))
    by_loss = [steps for reason, steps in trained_again(report) if reason.startswith("lost ")]
    agreed = [steps for reason, steps in trained_again(report) if not reason.startswith("lost ")]
    assert by_loss[0] <= 5, "the step of the loss, and those whose snapshots were on their way"
    # Rank 0's agent may see that the node that leaves has disconnected before it sees that its own workers stopped.
    assert all(steps <= 0 for steps in (*by_loss[1:], *agreed)), "no step is lost at an arrival or a notice"


def test_the_page_shows_lines_of_the_sample():
    sample = [line.partition("  # elastic")[0].strip() for line in SAMPLE.read_text().splitlines()]
    added = [line[1:].strip() for line in DIFF.splitlines() if line.startswith("+")]
    assert 0 < len(added) <= 3
    assert [line for line in sample if line in added] == added, "in this order"
    removed = [line[1:] for line in DIFF.splitlines() if line.startswith("-")]
    assert len(removed) <= len(added)
    assert not set(removed) & set(sample)
    kept = [line.strip() for line in DIFF.splitlines() if line.strip() and line[0] == " " and "..." not in line]
    names = set(re.findall(r"\w+", SAMPLE.read_text()))
    assert set(re.findall(r"\w+", " ".join(kept))) <= names, "all that it keeps is in the sample, too"
