"""The identity of a node from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_elastic.config import ElasticResources, Plan, TableRendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import PlanError, UsageError
from azureml_elastic.node.host.addresses import local_address
from azureml_elastic.node.host.identity import read_identity

PLAN = Plan(
    resources=ElasticResources(max_instance_count=2),
    rendezvous=TableRendezvous(endpoint="/tmp/t.sqlite"),
)


def test_a_node_of_an_azure_ml_run():
    environ = {variables.PLAN: PLAN.to_json(), "AZUREML_RUN_ID": "child", "AZUREML_ROOT_RUN_ID": "root"}
    identity = read_identity(NodeEnvironment.read(environ), checkpoint_dir="/mnt/checkpoints")
    assert identity.run_id == "root"
    assert identity.plan.checkpoint.path == "/mnt/checkpoints/root"
    assert identity.folder == Path.cwd() / "outputs/azureml-elastic"
    assert identity.node != read_identity(NodeEnvironment.read(environ)).node


@pytest.mark.parametrize("placement", ["gang", "service"])
def test_nodes_that_share_a_job_have_its_id_whatever_it_is_a_part_of(placement):
    """Steps of a pipeline and trials of a sweep have one root."""
    plan = PLAN.model_copy(update={"resources": ElasticResources(max_instance_count=2, placement=placement)})
    environ = {variables.PLAN: plan.to_json(), "AZUREML_ROOT_RUN_ID": "root"}
    assert [
        read_identity(NodeEnvironment.read({**environ, "AZUREML_RUN_ID": f"trial_{k}"})).run_id for k in (0, 1)
    ] == ["trial_0", "trial_1"]
    assert (
        read_identity(NodeEnvironment.read({**environ, "AZUREML_RUN_ID": "again", variables.RUN_ID: "first"})).run_id
        == "first"
    )


def test_steps_whose_nodes_are_jobs_of_their_own_differ_by_name():
    environ = {variables.PLAN: PLAN.to_json(), "AZUREML_RUN_ID": "child", "AZUREML_ROOT_RUN_ID": "root"}
    assert read_identity(NodeEnvironment.read({**environ, variables.STEP: "evaluate"})).run_id == "root-evaluate"


def test_two_submissions_of_one_plan_have_two_runs():
    ids = {
        read_identity(NodeEnvironment.read({variables.PLAN: PLAN.to_json(), "AZUREML_ROOT_RUN_ID": run})).run_id
        for run in ("a", "b")
    }
    assert ids == {"a", "b"}


def test_a_local_node():
    environ = {
        variables.PLAN: PLAN.model_copy(update={"name": "mine"}).to_json(),
        variables.NODE_ID: "node-3",
        variables.RUN_DIR: "/tmp/run",
        "AZUREML_RUN_ID": "other",
    }
    identity = read_identity(NodeEnvironment.read(environ))
    assert (identity.run_id, identity.node, identity.folder) == ("mine", "node-3", Path("/tmp/run"))
    assert identity.host == "127.0.0.1"


def test_a_node_may_have_a_metadata_service_of_its_own():
    environ = {variables.PLAN: PLAN.to_json(), variables.RUN_ID: "run"}

    def address(**own):
        return read_identity(NodeEnvironment.read({**environ, **own})).plan.preemption.scheduled_events

    assert address() == "http://169.254.169.254/metadata"
    assert (
        address(**{variables.SCHEDULED_EVENTS: "http://127.0.0.1:5/vm/metadata/"}) == "http://127.0.0.1:5/vm/metadata"
    )
    assert address(**{variables.SCHEDULED_EVENTS: ""}) is None
    with pytest.raises(UsageError, match=variables.SCHEDULED_EVENTS) as caught:
        address(**{variables.SCHEDULED_EVENTS: "ftp://x"})
    assert "'ftp://x'" in str(caught.value)


def test_without_a_plan_the_error_says_how_to_get_one():
    with pytest.raises(PlanError, match="ElasticCommandJob"):
        read_identity(NodeEnvironment.read({}))


def test_without_a_run_the_error_says_what_to_set():
    with pytest.raises(UsageError, match=variables.RUN_ID):
        read_identity(NodeEnvironment.read({variables.PLAN: PLAN.to_json()}))


@pytest.mark.parametrize(
    "endpoint", ["/tmp/t.sqlite", "http://127.0.0.1:10002/devstoreaccount1", "http://localhost:1/x"]
)
def test_a_table_on_this_machine_is_reached_by_loopback(endpoint):
    assert local_address(endpoint) == "127.0.0.1"
