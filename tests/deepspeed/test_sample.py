"""The sample, over real nodes of which one is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_elastic.local.chaos import parse_schedule
from azureml_elastic.local.cluster import LocalCluster

SAMPLE = Path(__file__).parents[2] / "samples" / "deepspeed_zero.py"


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_lost_node_costs_a_few_steps(stage, tmp_path):
    chaos = parse_schedule("kill=node-1@step:32")
    cluster = LocalCluster((1, 2), chaos=chaos, run_dir=tmp_path / "run", audit=True, timeout_s=150)
    report = cluster.run([str(SAMPLE), "--stage", stage, "--step-delay", "0.05"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit.complete, report.audit
    assert report.rounds[1].restored_step in (20, 25, 30, 35)
    assert all(node.leftovers == 0 for node in report.nodes)
