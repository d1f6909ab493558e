"""Whole runs: real nodes, real workers, real losses. Everything below the command line is the production code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, ElasticResources, Plan, TableRendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.ledger.summary import Report
from tests.support.paths import PROGRAMS, SAMPLES
from tests.support.whole_runs import after_gathering, assert_whole, gathering_cluster

PROGRAM = str(PROGRAMS / "chaos_train.py")
TWO_WORKERS = {"process_count_per_instance": 2}


def run(tmp_path: Path, chaos: str = "", *argv: str, **options) -> Report:
    distribution = ElasticDistribution(**options.pop("distribution", {}))
    cluster = gathering_cluster(tmp_path, chaos, **{"nodes": (1, 3), "distribution": distribution, **options})
    return cluster.run(list(argv) or [PROGRAM])


def log(report: Report, node: str) -> str:
    return (report.paths.logs / f"{node}.log").read_text()


def test_rank_0_is_lost_and_replaced(tmp_path, azurite, monkeypatch):
    """With the production start of every process, and the service's own emulator as the table."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    arguments = (PROGRAM, "--epochs", "5", "--full", "3")
    chaos = "kill=rank0@step:25,add@step:40"
    report = run(tmp_path, chaos, *arguments, table="azurite", start="command")
    assert_whole(report)
    assert after_gathering(report, 3) == (3, 2, 3)
    assert tuple(json.loads(report.paths.report.read_text())["world_sizes"]) == report.world_sizes
    # Neither a kill nor a join costs a completed step.
    assert report.audit.rolled_back_steps == 0
    _, second, third = report.rounds[-3:]
    assert third.first_step == second.last_step + 1


def test_workers_do_not_inherit_the_tables_connection_string(tmp_path, azurite, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "of-the-script")
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('found', [name for name in os.environ if name.startswith('AZURE_STORAGE')])")
    report = run(tmp_path, "", str(script), nodes=(1, 1), table="azurite", audit=False)
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert "found ['AZURE_STORAGE_ACCOUNT_NAME']" in log(report, "node-0")


def test_a_plain_script_with_its_own_checkpoint_is_elastic_too(tmp_path):
    script = str(SAMPLES / "plain_ddp.py")
    arguments = ("--epochs", "14", "--step-delay", "0.1", "--checkpoint", str(tmp_path / "own.pt"))
    report = run(tmp_path, "kill=rank0@5s,add@6s", script, *arguments, audit=False)
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    # On a busy machine the third node may come after the loss, which is at a time instead of a step.
    assert any(later < earlier for earlier, later in pairwise(report.world_sizes))
    assert report.world_sizes[-1] == 3


@pytest.mark.shards_on_cpus
def test_a_sharded_model_is_resharded_for_the_nodes_that_are_there(tmp_path):
    script = str(SAMPLES / "fsdp2.py")
    arguments = ("--epochs", "5", "--step-delay", "0.2", "--blocks", "1", "--width", "32")
    report = run(tmp_path, "kill=rank0@step:35,add@step:40", script, *arguments, nodes=(1, 2))
    assert_whole(report)
    assert after_gathering(report, 2) == (2, 1, 2)
    assert "accuracy" in log(report, "node-1")


@pytest.mark.shards_on_cpus
def test_two_replicas_of_two_nodes_lose_a_node_and_get_another_one(tmp_path):
    script = str(SAMPLES / "hsdp.py")
    arguments = ("--epochs", "4", "--step-delay", "0.1", "--blocks", "1", "--width", "32")
    options = {
        "nodes": (2, 4),
        "distribution": {"nodes_per_replica": 2},
        "checkpoint": CheckpointPolicy(every_steps=1000),
    }
    report = run(tmp_path, "kill=node-3@step:25,add@step:40", script, *arguments, **options)
    assert_whole(report)
    # The partner of the lost node waits until the new one comes.
    assert after_gathering(report, 4) == (4, 2, 4)
    assert report.audit.rolled_back_steps == 0
    for before, after in pairwise(report.rounds[-3:]):
        assert after.first_step == before.last_step + 1
    assert "accuracy" in "".join(path.read_text() for path in report.paths.logs.glob("*.log"))


def test_several_workers_a_node_as_a_module(tmp_path, monkeypatch):
    monkeypatch.chdir(PROGRAMS)
    report = run(tmp_path, "", "python", "-m", "chaos_train", "--epochs", "1", nodes=(2, 2), distribution=TWO_WORKERS)
    assert_whole(report)
    assert report.world_sizes == (4,)


def test_nodes_of_two_runs_on_one_machine_do_not_meet_in_its_temporary_folder(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    (temporary / ".azureml-elastic-health-node-0").mkdir(parents=True)  # the file of another run's node-0
    monkeypatch.setenv("TMPDIR", str(temporary))
    report = run(tmp_path, "", PROGRAM, "--epochs", "1", nodes=(1, 1))
    assert_whole(report)
    assert [path.name for path in temporary.glob(".azureml-elastic-health*")] == [".azureml-elastic-health-node-0"]


def test_a_node_that_comes_after_the_end_exits_at_once_with_0(tmp_path):
    report = run(tmp_path, "", PROGRAM, "--epochs", "1", nodes=(1, 1))
    assert_whole(report)
    plan = Plan(
        resources=ElasticResources(max_instance_count=1),
        rendezvous=TableRendezvous(endpoint=str(report.paths.run_dir / "table.sqlite")),
        name=report.run_id,
    )
    environ = {**os.environ, variables.PLAN: plan.to_json(), variables.RUN_DIR: str(tmp_path / "late")}
    late = subprocess.run(
        [sys.executable, "-m", "azureml_elastic.node", "--", PROGRAM],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert late.returncode == 0, late.stderr
    assert "weights" not in late.stdout
