"""The sample, over nodes of which one is lost."""

from __future__ import annotations

from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import forked_with
from tests.support.paths import SAMPLES
from tests.support.whole_runs import GATHERING

SAMPLE = SAMPLES / "deepspeed_zero.py"
SLOWLY = (str(SAMPLE), "--epochs", "6", "--step-delay", "0.1")
"""It trains for 10 s after the step of the loss, which a busy machine may notice late."""


def test_a_lost_node_costs_a_few_steps(tmp_path):
    chaos = parse_schedule("kill=node-1@step:22")
    options = {
        "start": forked_with(SAMPLE),
        "run_dir": tmp_path / "run",
        "audit": True,
        "timeout": 150,
        "rendezvous": GATHERING,
    }
    report = LocalCluster((1, 2), chaos=chaos, **options).run([*SLOWLY, "--stage", "3"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit.complete, report.audit
    before, after = report.rounds[-2:]
    assert (before.world_size, after.world_size) == (2, 1)
    assert after.restored_step % 5 == 0
    assert after.restored_step >= before.last_step - 20
    assert all(node.leftovers == 0 for node in report.nodes)
