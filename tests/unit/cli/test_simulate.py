"""``azureml-elastic simulate``: results in the terminal and as JSON, and mistakes before anything is simulated."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from azureml_elastic.cli import app
from azureml_elastic.ledger.events import NodeReady, NodeStarted, Progress, RoundEntered, RunEnded
from azureml_elastic.simulate.traces import read_trace
from tests.support.histories import write_events

RUN = CliRunner()
HAZARD = ("--hazard", "loss_every=1h")
PRICES = {
    "currency": "EUR",
    "date": None,
    "source": "a test",
    "per_hour": {"large": {"dedicated": 5, "low_priority": 1}, "small": {"dedicated": 2}},
}


def call(*arguments):
    return RUN.invoke(app, ["simulate", *map(str, arguments)])


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(PRICES))
    return path


def test_strategies_are_compared_and_settings_recommended(tmp_path, prices):
    written = tmp_path / "results.json"
    result = call(
        *HAZARD, "--nodes", "1:4", "--work", "20nh", "--dedicated", 2, "--prices", prices, "--size", "large",
        "--json", written,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "★" in result.output
    document = json.loads(written.read_text())
    rigid, restarted, elastic = document["strategies"]
    assert [each["strategy"] for each in (rigid, restarted, elastic)] == ["rigid", "restart", "elastic"]
    assert elastic["finished"]
    assert elastic["seconds"] < restarted["seconds"]
    assert (elastic["currency"], elastic["lost_steps"]) == ("EUR", 0)
    assert sum(total["seconds"] for total in elastic["activities"]) == pytest.approx(3600 * elastic["node_hours"])
    assert sum(each["recommended"] for each in document["candidates"]) == 1


def test_a_synthetic_trace_is_written_and_simulated(tmp_path):
    path = tmp_path / "trace.csv"
    result = call(*HAZARD, "--machines", 3, "--for", "2d", "--seed", 4, "--synthesize", path)
    assert result.exit_code == 0, result.output
    assert read_trace(path).machines == 3
    result = call("--trace", path, "--nodes", "1:3", "--work", 5000, "--no-sweep")
    assert result.exit_code == 0, result.output
    assert "elastic" in result.output
    assert "★" not in result.output


def test_durations_come_from_a_file_then_from_a_run_then_from_options(tmp_path):
    events = [
        NodeStarted(time=1, began=1, node="a", host="", pid=1),
        NodeReady(time=43, node="a"),
        RoundEntered(time=44, node="a", round=1, rank=0, members=("a",), world_size=1),
        *(Progress(time=50 + 2.5 * step, node="a", round=1, step=step) for step in range(1, 20)),
        RunEnded(time=120, node="a", round=1, succeeded=True),
    ]
    write_events(tmp_path / "run" / "events", events)
    given, written = tmp_path / "given.json", tmp_path / "written.json"
    given.write_text('{"provisioning_seconds": 55, "start_seconds": 1, "restore_seconds": 8}')
    result = call(
        *HAZARD, "--nodes", "1:2", "--work", 100, "--no-sweep", "--parameters", given, "--calibrate", tmp_path / "run",
        "--set", "restore_seconds=2min", "--write-parameters", written,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(written.read_text())
    assert found["provisioning_seconds"] == 55
    assert found["start_seconds"] == 42
    assert found["restore_seconds"] == 120
    assert found["step_seconds"] == {"1": 2.5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--work", 5), "Give either --trace FILE or --hazard"),
        ((*HAZARD, "--trace", "x.csv", "--work", 5), "not both"),
        (HAZARD, "--work is missing"),
        ((*HAZARD, "--work", 5, "--nodes", "4:2"), "has a minimum above its maximum"),
        ((*HAZARD, "--work", 5, "--nodes", "4:8", "--machines", 2), "have 2 nodes and the minimum is 4"),
        ((*HAZARD, "--work", 5, "--dedicated", -1), "--dedicated=-1 is below 0"),
        ((*HAZARD, "--work", 5, "--set", "speed=3"), "--set 'speed=3' is not NAME=VALUE"),
        ((*HAZARD, "--work", 5, "--set", "start_seconds=x"), "start_seconds='x' is no duration"),
        ((*HAZARD, "--work", 5, "--step-seconds", "0s"), "greater than 0"),
        ((*HAZARD, "--work", 5, "--within", "0s"), "is empty"),
        ((*HAZARD, "--work", 5, "--calibrate", "nowhere"), "nowhere has no events of a run"),
        ((*HAZARD, "--work", 5, "--parameters", "nowhere.json"), "cannot be read"),
        (("--trace", "nowhere.csv", "--work", 5), "nowhere.csv cannot be read"),
        (("--trace", "nowhere.csv", "--synthesize", "x.csv"), "give --hazard instead"),
    ],
)
def test_mistakes_are_refused_before_anything_is_simulated(arguments, words):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_prices_need_the_size_and_the_tier(prices):
    common = (*HAZARD, "--work", 5, "--prices", prices)
    assert "--prices needs --size; the file has large, small." in call(*common).output
    assert "The prices have no low_priority price of small" in call(*common, "--size", "small").output
