"""The MLflow run that workers find in their environment."""

import pytest

from azureml_elastic.config import ElasticResources, Plan
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.agent.worker_group import tracked_run_variables

NODE = {"MLFLOW_RUN_ID": "node", "AZUREML_RUN_ID": "node", "AZUREML_ROOT_RUN_ID": "root"}
JOB = dict.fromkeys(NODE, "job")


@pytest.mark.parametrize(
    ("placement", "environ", "run"),
    [
        ("fan_out", NODE, "root"),
        ("fan_out", {**NODE, "AZUREML_ROOT_RUN_ID": "again", "AZUREML_ELASTIC_FIRST_JOB": "root"}, "root"),
        ("gang", {**JOB, "AZUREML_ELASTIC_FIRST_JOB": "first"}, "first"),
        ("gang", JOB, None),
        ("gang", NODE, None),  # below a parent job: its own run
        ("service", JOB, None),
        ("fan_out", {**NODE, "MLFLOW_RUN_ID": "mine"}, None),  # the command's choice
        ("fan_out", {"AZUREML_RUN_ID": "node", "AZUREML_ROOT_RUN_ID": "root"}, None),  # no MLflow
        ("fan_out", {"MLFLOW_RUN_ID": "mine"}, None),  # not on Azure ML
    ],
)
def test_all_nodes_log_to_the_run_of_the_first_job(placement, environ, run):
    plan = Plan(resources=ElasticResources(max_instance_count=2, placement=placement))
    assert tracked_run_variables(plan, NodeEnvironment.read(environ)) == (
        {} if run is None else {"MLFLOW_RUN_ID": run, "AZUREML_RUN_ID": run}
    )
