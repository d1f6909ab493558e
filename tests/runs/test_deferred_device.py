"""A lost node costs no step on a device that runs behind the host: whole runs of real nodes, as with GPUs."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED, run_script
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING, after_gathering

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
    report = LocalCluster(
        (1, 3),
        start=FORKED,
        chaos=parse_schedule("kill=rank0@step:25"),
        run_dir=tmp_path / "run",
        audit=True,
        distribution=ElasticDistribution(recovery=recovery, handover_timeout=timedelta(seconds=10)),
        rendezvous=GATHERING,
    ).run([str(PROGRAM), "--gather", "3", "--fault-at", "25"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert after_gathering(report, 3) == (3, 2)
    assert report.audit.complete, report.audit
    assert report.audit.rolled_back_steps == 0, report.audit
    logs = "".join(Path(path).read_text() for path in report.paths.logs.glob("*.log"))
    assert weights(logs) == pytest.approx(undisturbed, abs=1e-6), "each step was applied once, and nothing else"
