"""Whole runs of real nodes with GPUs and NCCL."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import workers_at_step

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs: NCCL takes one rank for each"
)


@pytest.mark.parametrize("stays", [False, True], ids=["restart", "in_process"])
def test_a_killed_worker_costs_no_step(tmp_path, monkeypatch, stays):
    monkeypatch.setenv("AZUREML_ELASTIC_IN_PROCESS_ON_GPU", "1")
    recovery = "in_process" if stays else "restart"
    cluster = LocalCluster(
        (1, 1),
        start=FORKED,
        run_dir=tmp_path / "run",
        audit=True,
        distribution=ElasticDistribution(process_count_per_instance=2, recovery=recovery),
    )

    def kill():
        os.kill(workers_at_step(tmp_path / "run" / "events", 25, "node-0").pids[1], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    report = cluster.run([str(PROGRAMS / "chaos_train.py"), "--epochs", "5", "--fault-at", "25", "--full", "2"])
    killing.join()
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit.complete, report.audit
    assert report.audit.rolled_back_steps == 0, report.audit
