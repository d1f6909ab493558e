"""Publishing to the real MLflow, in files and in a database: each step once, by whichever node."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from azureml_elastic.config import ElasticResources, MetricsPolicy, Plan
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.publishing.mlflow import RUN_TAG, MlflowPublisher, MlflowTarget, mlflow_target
from azureml_elastic.node.publishing.translation import Update, Value

pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's use of SQLAlchemy
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # MLflow leaves its connections to the garbage collector
]

PLAN = Plan(resources=ElasticResources(max_instance_count=1))


@pytest.fixture(params=["files", "database"])
def uri(request, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if request.param == "files":
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        return (tmp_path / "mlruns").as_uri()
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # where the folder of artifacts is made
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def target(uri, **fields):
    return MlflowTarget(
        **{"tracking_uri": uri, "run_id": None, "experiment_id": None, "experiment_name": None, "name": "run-1"}
        | fields
    )


def publisher_of(uri, at=1000.0, **fields):
    return MlflowPublisher(target(uri, **fields), clock=lambda: at)


def update(*steps, name="loss", **fields):
    return Update(tuple(Value(name, step, step / 10, 1000.0 + step) for step in steps), **fields)


def run_of(client, experiment="0"):
    (run,) = client.search_runs([experiment])
    return run


def history(client, run, name="loss"):
    return [(each.step, each.value, each.timestamp) for each in client.get_metric_history(run.info.run_id, name)]


def test_steps_that_are_trained_again_are_logged_once_by_whichever_node(uri, client):
    first, second = publisher_of(uri), publisher_of(uri)
    first.publish([update(0, took_over=True), update(1, 2, tags={"elastic.round.1": "sealed"})])
    first.publish([update(3, 4), update(4, name="accuracy")])
    second.publish([update(2, 3, took_over=True, resumed=1), update(4, 5, 6)])
    second.publish([update(4, 5, name="accuracy")])
    first.publish([update(5, 6, 7, took_over=True)])
    run = run_of(client)
    assert history(client, run) == [(step, step / 10, 1000 * (1000 + step)) for step in range(8)]
    assert [step for step, _, _ in history(client, run, "accuracy")] == [4, 5]
    assert run.data.tags["elastic.round.1"] == "sealed"
    assert run.data.tags[RUN_TAG] == run.info.run_name == "run-1"
    assert run.info.status == "RUNNING"
    first.publish([Update(ended=True)])
    assert run_of(client).info.status == "FINISHED"


def test_a_node_that_was_frozen_repeats_no_step_of_the_one_that_replaced_it(uri, client):
    frozen, other = publisher_of(uri, at=1500.0), publisher_of(uri)
    frozen.publish([update(1, 2, took_over=True)])
    other.publish([update(3, 4, took_over=True)])
    frozen.publish([update(3)])
    assert [step for step, _, _ in history(client, run_of(client))] == [1, 2, 3, 4]


def test_many_values_and_values_that_are_not_finite(uri, client):
    publisher = publisher_of(uri)
    publisher.publish([update(*range(1200), took_over=True)])
    publisher.publish([Update((Value("loss", 1200, float("nan"), 3000.0), Value("loss", 1201, float("inf"), 3000.0)))])
    assert [step for step, _, _ in history(client, run_of(client))] == list(range(1202))


def test_each_run_has_its_own_in_the_named_experiment(uri, client):
    for name in ("run-1", "run-2"):
        for _ in range(2):
            publisher = publisher_of(uri, experiment_name="digits", name=name)
            publisher.publish([update(1, took_over=True)])
    experiment = client.get_experiment_by_name("digits").experiment_id
    assert sorted(run.info.run_name for run in client.search_runs([experiment])) == ["run-1", "run-2"]


def test_a_given_run_is_used_and_its_end_left_to_its_owner(uri, client):
    given = client.create_run("0")
    publisher = publisher_of(uri, run_id=given.info.run_id)
    publisher.publish([update(1, took_over=True, ended=True)])
    assert history(client, run_of(client)) == [(1, 0.1, 1001000)]
    assert run_of(client).info.status == "RUNNING"


def test_a_call_that_failed_after_it_has_logged_something_is_repeated_for_the_rest(uri, client, tmp_path):
    publisher = publisher_of(uri)
    publisher.publish([update(1, 2, took_over=True)])
    run = run_of(client).info.run_id
    client.log_metric(run, "loss", 0.3, timestamp=1003000, step=3)  # as if the answer had been lost
    publisher._logged = None
    publisher.publish([update(2, 3, 4)])
    assert [step for step, _, _ in history(client, run_of(client))] == [1, 2, 3, 4]


def test_what_mlflow_rejects_is_dropped_with_a_warning(uri, client, caplog):
    publisher = publisher_of(uri)
    publisher.publish([update(1, name="not%allowed", took_over=True), update(1, 2)])
    assert "MLflow rejects 'not%allowed', which is dropped" in caplog.text
    assert [step for step, _, _ in history(client, run_of(client))] == [1, 2]


def test_where_to_publish_follows_from_the_policy_and_the_environment():
    assert mlflow_target(PLAN, "run", NodeEnvironment.read({})) is None
    environ = {"MLFLOW_TRACKING_URI": "http://there", "MLFLOW_EXPERIMENT_NAME": "digits"}
    assert mlflow_target(PLAN, "run", NodeEnvironment.read(environ)) == target(
        "http://there", experiment_name="digits", name="run"
    )
    off = PLAN.model_copy(update={"metrics": MetricsPolicy(mlflow=False)})
    assert mlflow_target(off, "run", NodeEnvironment.read(environ)) is None
    job = {**environ, "AZUREML_RUN_ID": "job_0", "MLFLOW_RUN_ID": "job_0", "AZUREML_ELASTIC_FIRST_JOB": "first"}
    assert mlflow_target(PLAN, "run", NodeEnvironment.read(job)).run_id == "first", (
        "that of the run, not of the node's own job"
    )
    own = {**environ, "MLFLOW_RUN_ID": "mine"}
    assert mlflow_target(PLAN, "run", NodeEnvironment.read(own)).run_id == "mine"
