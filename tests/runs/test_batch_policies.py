"""Batch policies over whole runs: real nodes, real losses."""

from __future__ import annotations

import functools

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, FixedPerWorkerBatch
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING, after_gathering

PROGRAM = str(PROGRAMS / "policy_train.py")


def learnt(tmp_path, *arguments, nodes=(1, 3), chaos="", recovery="restart", **options):
    """Return the report, and what the run has printed in the end: digest, loss, learning rate, steps."""
    report = LocalCluster(
        nodes,
        start=FORKED,
        chaos=parse_schedule(chaos) if chaos else None,
        run_dir=tmp_path / "-".join(["run", recovery, *map(str, nodes)]),
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=10),
        distribution=ElasticDistribution(recovery=recovery),
        rendezvous=GATHERING,
        **options,
    ).run([PROGRAM, *arguments])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit.complete, report.audit
    logs = "".join(path.read_text() for path in report.paths.logs.glob("*.log"))
    (line,) = {line.partition("learnt ")[2] for line in logs.splitlines() if "learnt " in line}
    return report, line.split()


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """Return what a run on one node, without faults, has printed in the end: ``static(*arguments)``, once for each."""
    return functools.cache(
        lambda *arguments: learnt(tmp_path_factory.mktemp("static"), *arguments, "--step-delay", "0", nodes=(1, 1))[1]
    )


CHAOS = "kill=rank0@step:25,add@step:40"


@pytest.mark.parametrize("recovery", ["restart", "in_process"])
def test_exact_sums_are_the_same_bits_whatever_happens_to_the_nodes(recovery, static, tmp_path):
    report, elastic = learnt(tmp_path, "exact", "--full", "3", chaos=CHAOS, recovery=recovery)
    assert after_gathering(report, 3) == (3, 2, 3)
    assert elastic == static("exact")


def test_shards_are_read_once_whatever_happens_to_the_nodes(tmp_path):
    arguments = ["logical-workers", "--shards", "--epochs", "4", "--full", "3"]
    report, _ = learnt(tmp_path, *arguments, chaos=CHAOS)
    assert after_gathering(report, 3) == (3, 2, 3)
    assert report.audit.dataset_size == 231


@pytest.mark.parametrize(("policy", "recovery"), [("per-worker", "in_process"), ("adascale", "restart")])
def test_a_batch_per_worker_follows_the_world(policy, recovery, static, tmp_path):
    shards = policy == "per-worker"
    arguments = [policy, "--epochs", "12", *(["--shards"] if shards else [])]
    alone = static(*arguments)
    chaos = "kill=rank0@step:15,add@step:25"
    report, elastic = learnt(tmp_path, *arguments, "--full", "3", chaos=chaos, recovery=recovery)
    assert after_gathering(report, 3) == (3, 2, 3)
    assert report.audit.dataset_size == (231 if shards else 236)
    assert int(elastic[3]) < int(alone[3])
    if policy == "per-worker":
        assert elastic[2] == alone[2]  # the schedule counts samples
    assert float.fromhex(elastic[1]) < 3 * float.fromhex(alone[1]) + 1


def test_the_plan_can_say_the_policy(tmp_path):
    arguments = ["--epochs", "1", "--step-delay", "0"]
    policy = FixedPerWorkerBatch(scaling="linear")
    _, planned = learnt(tmp_path, "planned", *arguments, nodes=(2, 2), batch=policy)
    _, written = learnt(tmp_path / "other", "per-worker", *arguments, nodes=(2, 2))
    assert planned == written
    assert int(planned[3]) == 10
