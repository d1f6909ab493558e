"""Twenty random schedules of losses and new nodes: each run ends well and sees each sample exactly once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from azureml_elastic.local.chaos import random_schedule
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults import Kill, Preempt, Schedule

PROGRAM = str(Path(__file__).parent / "training" / "chaos_train.py")


def schedule(seed: int) -> Schedule:
    """Draw losses and new nodes; rank 0's node is killed first, and every second schedule also preempts."""
    drawn = random_schedule(seed, faults=2 + seed % 2, last_step=50)
    sudden = [
        Kill(fault.target, fault.when) if isinstance(fault, Preempt) and (index == 0 or seed % 2 == 0) else fault
        for index, fault in enumerate(drawn.faults)
    ]
    return replace(drawn, faults=tuple(sudden))


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(20))
def test_random_losses_and_new_nodes(tmp_path, seed):
    faults = schedule(seed)
    cluster = LocalCluster(
        (1, 3), chaos=faults, run_dir=tmp_path / "run", audit=True, checkpoint_steps=7, timeout_s=150
    )
    report = cluster.run([PROGRAM])
    trail = f"{faults}: {report.message}; files in {report.paths.run_dir}"
    assert (report.outcome, report.exit_code) == ("succeeded", 0), trail
    assert report.audit is not None, trail
    assert (report.audit.missing, report.audit.repeated) == (0, 0), trail
    assert (report.audit.steps, report.audit.seen) == (80, 944), trail
    assert any(fault.nodes for fault in report.faults), trail
    assert all(node.leftovers == 0 for node in report.nodes), trail
