"""What a script logs with the real MLflow lands in one run, whichever node is rank 0."""

from importlib.util import find_spec

import pytest

from azureml_elastic import ElasticCommandJob, ElasticDistribution, ElasticResources
from azureml_elastic.testing import LocalWorkspace
from tests.support.node_server import FORKED

SCRIPT = """
import os

import mlflow

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with mlflow.start_run() as run:
    assert mlflow.active_run().info.run_id == os.environ["AZUREML_RUN_ID"]
    mlflow.log_param("epochs", 3)
    mlflow.set_tag("size", size)
    mlflow.log_metrics({f"loss of {rank}": 0.5, "rank": rank}, step=rank)
    mlflow.log_metric(f"loss of {rank}", 0.25, step=7)
client = mlflow.MlflowClient()
history = client.get_metric_history(run.info.run_id, f"loss of {rank}")
assert [(each.step, each.value) for each in history] == [(rank, 0.5), (7, 0.25)], history
assert client.get_run(run.info.run_id).data.params == {"epochs": "3"}
assert client.get_run(run.info.run_id).info.status == "RUNNING"
print("logged to", run.info.run_id)
"""


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
def test_all_nodes_log_to_one_run(script):
    script(SCRIPT)
    job = ElasticCommandJob(
        code="src",
        command="python train.py",
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(min_instance_count=2, max_instance_count=2),
        distribution=ElasticDistribution(process_count_per_instance=1, max_restarts=0),
        replacement=None,
    )
    with LocalWorkspace(start=FORKED) as workspace:
        run = workspace.ml_client.jobs.create_or_update(job)
        assert workspace.wait(run.name, 200) == "Completed", workspace.log(run.name)
        children = [child.name for child in workspace.ml_client.jobs.list(parent_job_name=run.name)]
        logs = "".join(map(workspace.log, children))
        logged = workspace.logged(run.name)
        assert len(children) == 2
        assert all(workspace.logged(name).metrics == {} for name in children)
    assert logs.count(f"logged to {run.name}") == 2
    assert logged.parameters == {"epochs": "3"}
    assert logged.tags["size"] == "2"
    assert logged.metrics["loss of 0"] == [(0, 0.5), (7, 0.25)]
    assert logged.metrics["loss of 1"] == [(1, 0.5), (7, 0.25)]
    assert sorted(logged.metrics["rank"]) == [(0, 0.0), (1, 1.0)]
