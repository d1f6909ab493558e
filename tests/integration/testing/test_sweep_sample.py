"""The sample of a sweep."""

import importlib.util

from azureml_elastic.testing import LocalWorkspace, Pool
from tests.support.node_server import FORKED
from tests.support.paths import SAMPLES


def sample():
    spec = importlib.util.spec_from_file_location("sample_sweep", SAMPLES / "sweep" / "sweep.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_sweep_finds_the_better_learning_rate_and_its_trials_are_elastic_runs_of_their_own():
    with LocalWorkspace(pools={"cluster": Pool(nodes=2)}, start=FORKED) as workspace:
        client = workspace.ml_client
        name = client.jobs.create_or_update(sample().build()).name
        assert workspace.wait(name, 300) == "Completed"
        trials = list(client.jobs.list(parent_job_name=name))
        states = [(trial.name, trial.status, trial.tags["hyperparameters"]) for trial in trials]
        assert states == [
            (f"{name}_0", "Completed", '{"lr": "0.0001"}'),
            (f"{name}_1", "Completed", '{"lr": "0.05"}'),
        ]
        for trial in trials:
            assert "of 2 nodes" in workspace.log(trial.name)
            assert len(workspace.logged(trial.name).metrics.get("accuracy", ())) > 1, workspace.log(trial.name)
        properties = client.jobs.get(name).properties
        assert properties["best_child_run_id"] == f"{name}_1"
        assert float(properties["score"]) > 0.8
