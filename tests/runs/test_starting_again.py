"""What a script finds that is started again, and what it logs a second time."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.local.cluster import LocalCluster
from tests.support.failing_node import THREADS
from tests.support.node_server import FAILING, FORKED, StartAt
from tests.support.paths import PROGRAMS


@pytest.mark.skipif(find_spec("hydra") is None, reason="hydra-core is not installed")
def test_hydras_folder_has_the_name_of_the_run(tmp_path):
    folder = f"hydra.run.dir={tmp_path}/outputs/${{oc.env:TORCHELASTIC_RUN_ID}}"
    cluster = LocalCluster((1, 1), run_dir=tmp_path / "run", start=FORKED)
    report = cluster.run([str(PROGRAMS / "hydra_program.py"), folder, f"+facts={tmp_path / 'facts'}"])
    assert (report.outcome, len(report.rounds)) == ("succeeded", 2), report.message
    first, second = (tmp_path / "facts").read_text().splitlines()
    assert first == second == str(tmp_path / "outputs" / report.run_id)


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
def test_a_script_that_starts_again_goes_on_in_its_mlflow_run_and_its_folders(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    for name, value in {"DISABLE_TELEMETRY": "true", "ALLOW_FILE_STORE": "true", "TRACKING_URI": uri}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    client = MlflowClient(tracking_uri=uri)
    run = client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    board = ("--tensorboard", str(tmp_path / "board")) if find_spec("tensorboard") is not None else ()
    cluster = LocalCluster((1, 1), run_dir=tmp_path / "run", start=FORKED)
    report = cluster.run([str(PROGRAMS / "starting_again.py"), str(tmp_path / "facts"), *board])
    assert (report.outcome, len(report.rounds)) == ("succeeded", 2), report.message

    first, second = map(json.loads, (tmp_path / "facts").read_text().splitlines())
    changes = {name for name in first if first[name] != second[name]}
    assert changes == {"pid", "restarts"}
    assert (first["restarts"], second["restarts"], second["own variable"]) == ("0", "1", None)

    data = client.get_run(run).data
    assert data.params == {"lr": "0.1", "restarts": "0", "long": "x" * 300, "pid": str(first["pid"])}
    assert data.tags["run"] == run
    log = (report.paths.logs / "node-0.log").read_text()
    assert log.count("MLflow keeps the first values") == 2, "once for each of the two calls with others"
    assert f"pid '{first['pid']}' (now '{second['pid']}')" in log
    assert log.count(f"(now '{second['pid']}')") == 1
    assert "restarts '0' (now '1')" in log

    if board:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "board" / first["run"]))
        events.Reload()
        assert [(each.step, each.value) for each in events.Scalars("loss")] == [
            (0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)
        ]  # fmt: skip


@pytest.mark.parametrize("thread", [1, 4, 8])
def test_a_node_that_an_unexpected_error_keeps_from_its_first_round_begins_once_more(tmp_path, thread):
    """The others wait for it, as for the minimum of nodes it is needed."""
    failing = StartAt(
        more=lambda env: {THREADS: str(thread)} if env[variables.NODE_ID] == "node-1" else {}, starting=FAILING
    )
    cluster = LocalCluster((2, 2), run_dir=tmp_path / "run", start=failing, timeout=60)
    report = cluster.run([str(PROGRAMS / "chaos_train.py"), "--epochs", "1"])
    assert (report.outcome, report.world_sizes) == ("succeeded", (2,)), report.message
    assert (tmp_path / "run" / "logs" / "node-1.log").read_text().count("It begins once more") == 1
