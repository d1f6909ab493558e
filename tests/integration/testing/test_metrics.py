"""What run.log() logs is in the local workspace, as it will be in the studio: in the run of the first job."""

from importlib.util import find_spec

import pytest

from azureml_elastic import ElasticCommandJob, ElasticDistribution, ElasticResources, MetricsPolicy
from azureml_elastic.testing import LocalWorkspace
from tests.support.node_server import FORKED

SCRIPT = """
import torch

from azureml_elastic import train

run = train.start()
model = run.wrap(torch.nn.Linear(1, 1))
run.track(model=model)
for step in range(4):
    run.log({"loss": float("nan") if step == 3 else step / 2})
    run.commit()
"""


def job(nodes, **fields):
    return ElasticCommandJob(
        code="src",
        command="python train.py",
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(min_instance_count=nodes, max_instance_count=nodes),
        distribution=ElasticDistribution(process_count_per_instance=1, max_restarts=0),
        replacement=None,
        **fields,
    )


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
def test_metrics_and_tags_are_those_of_the_run(script):
    script(SCRIPT)
    with LocalWorkspace(start=FORKED) as workspace:
        run = workspace.ml_client.jobs.create_or_update(job(2))
        assert workspace.wait(run.name, 200) == "Completed", workspace.log(run.name)
        logged = workspace.logged(run.name)
        quiet = workspace.ml_client.jobs.create_or_update(job(1, metrics=MetricsPolicy(mlflow=False)))
        assert workspace.wait(quiet.name, 200) == "Completed", workspace.log(quiet.name)
        assert workspace.logged(quiet.name).metrics == {}
        children = [child.name for child in workspace.ml_client.jobs.list(parent_job_name=run.name)]
        assert all(workspace.logged(name).metrics == {} for name in children)
    steps = [step for step, _ in logged.metrics["loss"]]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 4)
    assert str(logged.metrics["loss"][-1][1]) == "nan"
    assert logged.metrics["elastic/world_size"][-1] == (4, 2.0)
    assert logged.tags["elastic.round.1"].startswith("round 1: sealed 2 workers on 2 nodes: ")
    assert logged.tags["elastic.end"] == "succeeded"
