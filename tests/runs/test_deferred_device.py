"""A lost node costs no step on a device that runs behind the host: whole runs of real nodes, as with GPUs."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from azureml_elastic.config import ElasticDistribution
from tests.support.node_server import run_script
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import after_gathering, assert_whole, gathering_cluster

PROGRAM = PROGRAMS / "deferred_train.py"


def weights(text: str) -> list[float]:
    (line,) = {line.partition("weights ")[2] for line in text.splitlines() if "weights " in line}
    return [float(word) for word in line.split()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    ended = run_script([sys.executable, PROGRAM, "--step-delay", "0"], timeout=120, cwd=tmp_path_factory.mktemp("one"))
    assert ended.returncode == 0, ended.stderr
    return weights(ended.stdout)


@pytest.mark.parametrize("recovery", ["restart", "in_process"])
def test_a_killed_node_costs_no_step(tmp_path, undisturbed, recovery):
    distribution = ElasticDistribution(recovery=recovery, handover_timeout=timedelta(seconds=10))
    cluster = gathering_cluster(tmp_path, "kill=rank0@step:25", nodes=(1, 3), distribution=distribution)
    report = cluster.run([str(PROGRAM), "--gather", "3", "--fault-at", "25"])
    assert_whole(report)
    assert after_gathering(report, 3) == (3, 2)
    assert report.audit.rolled_back_steps == 0, report.audit
    logs = "".join(Path(path).read_text() for path in report.paths.logs.glob("*.log"))
    assert weights(logs) == pytest.approx(undisturbed, abs=1e-6), "each step was applied once, and nothing else"
