"""Whole runs whose agents die of an unexpected error: the state in memory is in the storage for the next start."""

from __future__ import annotations

import os
import random
import signal

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution
from azureml_elastic.ledger.events import NodeStarted, Progress, Restored
from azureml_elastic.ledger.reading import EventReader
from tests.support.dying_node import SEED
from tests.support.node_server import DYING
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import assert_whole, at_step, gathering_cluster

PROGRAM = str(PROGRAMS / "chaos_train.py")


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(3, 29))])
def test_all_agents_die_of_an_unexpected_error_at_random_places(tmp_path, monkeypatch, seed):
    monkeypatch.setenv(SEED, str(seed))

    def arm(events) -> None:
        for each in events:
            if isinstance(each, NodeStarted):
                os.kill(each.pid, signal.SIGUSR1)

    options = {
        "checkpoint": CheckpointPolicy(every_steps=10_000),
        "distribution": ElasticDistribution(recovery="restart" if seed % 2 else "in_process"),
    }
    step = random.Random(seed).randrange(21, 40)
    with at_step(tmp_path / "first" / "run", step, 2, arm):
        first = gathering_cluster(tmp_path / "first", start=DYING, **options).run([PROGRAM, "--gather", "2"])
    assert (first.outcome, {node.exit_code for node in first.nodes}) == ("failed", {1}), first.message
    reached = max(each.step for each in EventReader(first.paths.events).read() if isinstance(each, Progress))

    second = gathering_cluster(tmp_path / "second", resume_from=first.paths.run_dir, **options).run([PROGRAM])
    assert_whole(second)
    restored = next(each for each in EventReader(second.paths.events).read() if isinstance(each, Restored))
    assert restored.step >= reached >= step
    assert second.audit.rolled_back_steps == 0
    assert all(node.leftovers == 0 for node in first.nodes)
