"""The plan and the environment that the nodes of a local cluster receive."""

from __future__ import annotations

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, Plan
from azureml_elastic.ledger.summary import Paths
from azureml_elastic.local.azurite import TableChoice, open_table_choice
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.launch import node_environment

SECRET = "AccountName=acc;AccountKey=c2VjcmV0;TableEndpoint=http://127.0.0.1:9/acc"


def test_the_plan_reaches_the_node_and_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", SECRET)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    paths = Paths.of(tmp_path)
    cluster = LocalCluster(
        (1, 3),
        distribution=ElasticDistribution(process_count_per_instance=2, max_restarts=5),
        checkpoint=CheckpointPolicy(every_steps=7),
        audit=True,
    )
    with open_table_choice("azurite", paths) as table:
        plan = cluster.plan(table, paths)
        environment = node_environment("node-4", plan, table, paths)
    received = Plan.from_json(environment["AZUREML_ELASTIC_PLAN"])
    assert received == plan
    assert (received.resources.min_instance_count, received.resources.max_instance_count) == (1, 3)
    assert received.distribution.process_count_per_instance == 2
    assert received.distribution.max_restarts == 5
    assert received.preemption.scheduled_events is None
    assert received.checkpoint.every_steps == 7
    assert received.checkpoint.path == str(tmp_path / "checkpoints")
    assert received.audit
    assert environment["AZUREML_ELASTIC_NODE_ID"] == "node-4"
    assert environment["AZUREML_ELASTIC_RUN_DIR"] == str(tmp_path)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "c2VjcmV0" not in environment["AZUREML_ELASTIC_PLAN"]


@pytest.mark.parametrize("threads", ["1", "4"])
def test_the_user_s_thread_count_is_kept(tmp_path, monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    paths, table = Paths.of(tmp_path), TableChoice("x.sqlite")
    plan = LocalCluster((1, 1)).plan(table, paths)
    assert node_environment("node-0", plan, table, paths)["OMP_NUM_THREADS"] == threads
