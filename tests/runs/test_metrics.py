"""What whole runs publish: each step once and in order, although rank 0's node is lost in the middle."""

from __future__ import annotations

import sqlite3
import statistics
import time
from contextlib import closing
from importlib.util import find_spec

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, MetricsPolicy
from azureml_elastic.ledger.events import Metrics
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING

PROGRAM = str(PROGRAMS / "logged_steps.py")

needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
needs_database = pytest.mark.skipif(
    find_spec("sqlalchemy") is None or find_spec("alembic") is None, reason="sqlalchemy or alembic is not installed"
)
needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """MLflow's store in files, as the nodes find it in their environment."""
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def cluster(tmp_path, *, nodes=(1, 2), chaos="", recovery="restart", max_restarts=3, **options):
    return LocalCluster(
        nodes,
        start=FORKED,
        chaos=parse_schedule(chaos) if chaos else None,
        run_dir=tmp_path / "run",
        distribution=ElasticDistribution(recovery=recovery, max_restarts=max_restarts),
        rendezvous=GATHERING,
        **options,
    )


def history(client, run, name):
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]


@needs_mlflow
@pytest.mark.parametrize("recovery", ["restart", "in_process"])
def test_each_step_is_in_mlflow_once_although_rank_0_s_node_is_lost(tmp_path, files, recovery):
    from mlflow import MlflowClient

    published = ("--wait-for", str(tmp_path / "mlruns"), "*/*/metrics/step")
    chaos = "kill=rank0@step:15"
    report = cluster(tmp_path, chaos=chaos, checkpoint=CheckpointPolicy(every_steps=7), recovery=recovery).run(
        [PROGRAM, *published]
    )
    assert (report.outcome, report.last_step) == ("succeeded", 40), report.message
    client = MlflowClient(tracking_uri=files)
    (run,) = client.search_runs(["0"])
    logged = history(client, run, "step")
    steps = [step for step, _ in logged]
    assert steps == sorted(set(steps)), "once and in order"
    assert all(value == step for step, value in logged)
    assert (steps[0], steps[-1]) == (1, 40)
    assert [step for step in steps if step < 15], "by the node that was lost"
    recorded = [event for event in EventReader(report.paths.events).read() if isinstance(event, Metrics)]
    assert set(steps) >= {event.step for event in recorded if "step" in event.values and event.step > 15}
    assert [step for step, _ in history(client, run, "epoch")][-1] == 40
    world = history(client, run, "elastic/world_size")
    assert (world[0], world[-1]) == ((0, 2), (40, 1))
    assert history(client, run, "elastic/restarts")[-1] == (40, 1)
    assert 0 < history(client, run, "elastic/goodput")[-1][1] <= 1
    # The median: on a busy machine one step may be seen late, and the next one then seems short.
    assert 0.05 < statistics.median(seconds for _, seconds in history(client, run, "elastic/step_seconds")) < 5
    assert all(value >= 0 for _, value in history(client, run, "elastic/checkpoint_pause_seconds"))
    tags = run.data.tags
    assert tags["elastic.round.1"].startswith("round 1: sealed 2 workers on 2 nodes: ")
    assert tags["elastic.round.2"].startswith("round 2: sealed 1 worker on 1 node: ")
    assert report.faults[0].nodes[0] in tags["elastic.round_end.1"]
    assert tags["elastic.end"] == "succeeded"
    assert run.info.status == "FINISHED"


@needs_mlflow
@needs_database
def test_a_database_gets_them_and_a_failed_run_says_so(tmp_path, files, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM_THAT_FAILS)
    report = cluster(tmp_path, nodes=(1, 1), max_restarts=0).run([str(program), f"{tmp_path}/mlflow.db"])
    assert report.outcome == "failed"
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        tags = dict(database.execute("SELECT key, value FROM tags"))
        runs = list(database.execute("SELECT status, e.name FROM runs JOIN experiments e USING (experiment_id)"))
        losses = list(database.execute("SELECT step FROM metrics WHERE key = 'loss' ORDER BY step"))
    assert tags["elastic.end"].startswith("failed: ")
    assert "no more" in tags["elastic.failure.1"]
    assert runs == [("FAILED", "digits")]
    assert losses[-1] == (3,)


PROGRAM_THAT_FAILS = """
import sqlite3
import statistics
import sys
import time

import torch
from azureml_elastic import train

run = train.start()
model = run.wrap(torch.nn.Linear(1, 1))
run.track(model=model)
for step in range(3):
    run.log({"loss": step})
    run.commit()


def published():
    try:
        return sqlite3.connect(sys.argv[1]).execute("SELECT count(*) FROM metrics WHERE key = 'loss'").fetchone()[0]
    except sqlite3.OperationalError:  # not made yet, or locked
        return 0


while not published():
    time.sleep(0.1)
raise ValueError("no more")
"""


@needs_mlflow
@needs_tensorboard
def test_steps_that_are_trained_again_are_published_once(tmp_path, files):
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    policy = MetricsPolicy(tensorboard=str(tmp_path / "logs"))
    arguments = (PROGRAM, "--epochs", "2", "--fail-after", "13", "--step-seconds", "0.2")
    report = cluster(tmp_path, nodes=(1, 1), checkpoint=CheckpointPolicy(every_steps=5), metrics=policy).run(arguments)
    assert (report.outcome, report.last_step) == ("succeeded", 20), report.message
    assert report.lost_steps == 3
    recorded = [event for event in EventReader(report.paths.events).read() if isinstance(event, Metrics)]
    rounds = {event.step: event.round for event in recorded if "step" in event.values}
    assert min(step for step, number in rounds.items() if number == 2) == 11
    client = MlflowClient(tracking_uri=files)
    (run,) = client.search_runs(["0"])
    steps = [step for step, _ in history(client, run, "step")]
    assert steps == sorted(set(steps))
    assert set(steps) == rounds.keys()
    assert "failed after step 13" in run.data.tags["elastic.failure.1"]
    found = EventAccumulator(str(tmp_path / "logs"), size_guidance={"scalars": 0})
    found.Reload()
    scalars = [each.step for each in found.Scalars("step")]
    assert scalars == sorted(set(scalars))
    assert set(scalars) >= {step for step, number in rounds.items() if number == 2}
    assert {"loss", "epoch", "elastic/world_size", "elastic/goodput"} <= set(found.Tags()["scalars"])


@needs_mlflow
def test_a_tracking_server_that_cannot_be_reached_costs_nothing_but_a_warning(tmp_path, files, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the discard port: nobody listens
    began = time.monotonic()
    report = cluster(tmp_path, nodes=(1, 1)).run([PROGRAM, "--epochs", "1", "--step-seconds", "0"])
    assert report.outcome == "succeeded", report.message
    assert time.monotonic() - began < 60
    log = "".join(path.read_text() for path in report.paths.logs.iterdir() if path.is_file())
    assert "published to MLflow within 5 s" in log or "Publishing to MLflow fails" in log


@needs_mlflow
def test_the_policy_switches_mlflow_off(tmp_path, files):
    policy = MetricsPolicy(mlflow=False)
    report = cluster(tmp_path, nodes=(1, 1), metrics=policy).run([PROGRAM, "--epochs", "1", "--step-seconds", "0"])
    assert report.outcome == "succeeded", report.message
    assert not (tmp_path / "mlruns").exists()
