"""Random losses, freezes, new nodes and faults of the table: each run ends well and sees each sample exactly once.

A few seeds run with the other tests; ``python -m nox -s chaos`` runs a hundred. A seed is replayed by
``CHAOS_SEEDS=17:18 python -m pytest tests/runs/test_random_schedules.py``.
"""

from __future__ import annotations

import os
from dataclasses import replace

import psutil
import pytest

from azureml_elastic.config import ElasticDistribution, HealthPolicy
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.model import Kill, Preempt, Schedule
from azureml_elastic.local.faults.schedule import random_schedule
from tests.support.node_server import start_node
from tests.support.paths import PROGRAMS

PROGRAM = str(PROGRAMS / "chaos_train.py")
KINDS = ("kill", "preempt", "add", "freeze", "table")
FIRST, LAST = (int(number) for number in os.environ.get("CHAOS_SEEDS", "0:4").split(":"))


def schedule(seed: int) -> Schedule:
    """Draw the faults; the first loss is always a sudden one."""
    drawn = random_schedule(seed, faults=2 + seed % 3, last_step=60, kinds=KINDS)
    faults = [
        Kill(fault.target, fault.when) if isinstance(fault, Preempt) and index == 0 else fault
        for index, fault in enumerate(drawn.faults)
    ]
    return replace(drawn, faults=tuple(faults))


def listening() -> set[int]:
    """Return the ports on which this process listens."""
    return {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_random_losses_and_new_nodes(tmp_path, seed, request, monkeypatch):
    faults = schedule(seed)
    table = "sqlite"
    if faults.disturbs_table:
        table = "azurite"
        emulator = request.getfixturevalue("azurite")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", emulator.connection_string)
    ports = listening()
    cluster = LocalCluster(
        (1, 3),
        popen=start_node,
        chaos=faults,
        run_dir=tmp_path / "run",
        audit=True,
        checkpoint_steps=7,
        table=table,
        # A node that is frozen twice joins again all the same.
        distribution=ElasticDistribution(
            recovery="in_process" if seed % 2 else "restart", health=HealthPolicy(quarantine_strikes=None)
        ),
        timeout_s=200,
    )
    report = cluster.run([PROGRAM])
    trail = f"seed {seed}: {faults}: {report.message}; files in {report.paths.run_dir}"
    assert (report.outcome, report.exit_code) == ("succeeded", 0), trail
    assert report.audit is not None, trail
    assert (report.audit.missing, report.audit.repeated) == (0, 0), trail
    assert (report.audit.steps, report.audit.seen) == (80, 944), trail
    assert all(node.leftovers == 0 for node in report.nodes), trail
    assert listening() <= ports, trail
