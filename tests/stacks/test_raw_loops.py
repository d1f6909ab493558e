"""A loop in the shape of nanoGPT, with three lines of this library, under faults."""

from __future__ import annotations

import sys

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.paths import SAMPLES
from tests.support.stacks import FAULTS
from tests.support.whole_runs import GATHERING

STEPS = 150


def test_a_loop_that_draws_at_random_never_repeats_its_draws(tmp_path):
    draws = tmp_path / "draws"
    draws.mkdir()
    cluster = LocalCluster(
        (1, 3),
        chaos=parse_schedule(FAULTS),
        run_dir=tmp_path / "run",
        timeout_s=150,
        distribution=ElasticDistribution(rendezvous=GATHERING),
    )
    options = ["--max-iters", str(STEPS), "--pause", "0.03", "--draws", str(draws)]
    report = cluster.run([sys.executable, str(SAMPLES / "char_gpt.py"), *options])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert not report.missed_faults
    assert len(report.world_sizes) > 2
    restored = [each.restored_step for each in report.rounds[1:]]
    assert restored == [each.last_step for each in report.rounds[:-1]], "no step is lost"
    assert report.rounds[-1].last_step == STEPS
    drawn = [line for file in draws.iterdir() for line in file.read_text().splitlines()]
    assert len(drawn) >= STEPS
    assert len(set(drawn)) == len(drawn)
