"""Whole runs whose table is away, slow, or lies: training goes on, nobody is lost, nothing is written twice."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from itertools import pairwise

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.ledger.events import CheckpointCommitted, Event, Progress, Restored, RoundReopened, RunEnded
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.faults.model import Disturbance
from azureml_elastic.local.faults.table_proxy import TableProxy
from azureml_elastic.node.rendezvous.row_keys import MEMBER_PREFIX, ROUND_KEY
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.opening import emulator_connection_string
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import after_gathering, assert_whole, gathering_cluster

PROGRAM = str(PROGRAMS / "chaos_train.py")
VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"

LONGEST_GAP_S = 6.5
"""Between two steps while the table is away for 8 s: one second for the first commit, the rest for a busy machine."""


@pytest.fixture
def run(tmp_path, azurite, monkeypatch):
    """Run the training with a fault schedule and return its report: ``run(chaos, *arguments, **options)``."""
    monkeypatch.setenv(VARIABLE, azurite.connection_string)

    def made(chaos: str, *arguments: str, **options) -> Report:
        report = gathering_cluster(tmp_path, chaos, 1, table="azurite", **options).run([PROGRAM, *arguments])
        assert_whole(report)
        return report

    return made


def events(report: Report) -> list[Event]:
    return sorted(EventReader(report.paths.events).read(), key=lambda event: event.time)


def during(report: Report, fault: int, duration_s: float) -> list[Event]:
    """Return what was written while a fault of the schedule lasted, from half a second after its begin."""
    begin = report.faults[fault].time
    return [event for event in events(report) if begin + 0.5 <= event.time <= begin + duration_s]


def longest_gap(found: list[Event]) -> float:
    """Return the longest time between two steps."""
    times = [event.time for event in found if isinstance(event, Progress)]
    return max(later - earlier for earlier, later in pairwise(times))


def rows(azurite, report: Report, prefix: str) -> dict:
    """Return the run's rows as they are in the table in the end."""
    table = open_table(TableRendezvous(endpoint=azurite.endpoint), report.run_id, NodeEnvironment.read({}))
    with contextlib.closing(table):
        return {row.key: row.value for row in table.query(prefix)}


def nodes(report: Report) -> dict:
    return {node.name: node.exit_code for node in report.nodes}


@pytest.mark.parametrize("seconds", [8, pytest.param(30, marks=pytest.mark.chaos)])
def test_training_goes_on_while_the_table_is_away(run, azurite, seconds):
    epochs = str(5 + 3 * seconds // 2)
    report = run(f"table=outage@step:25/{seconds}s", "--epochs", epochs, "--step-delay", "0.03", "--gather", "2")
    away = during(report, 0, seconds)
    assert longest_gap(away) < LONGEST_GAP_S
    assert len({event.step for event in away if isinstance(event, Progress)}) > 2 * seconds  # 20 where cores are free
    assert after_gathering(report, 2) == (2,)
    # No checkpoint was committed meanwhile; the next one made up for them, and the last one is that of the end.
    commits = [event for event in events(report) if isinstance(event, CheckpointCommitted)]
    assert not any(isinstance(event, CheckpointCommitted) for event in away)
    assert {commit.step for commit in commits} >= {10, report.last_step}
    assert any(away[-1].time < commit.time and commit.step < report.last_step for commit in commits)
    pointer = rows(azurite, report, "checkpoint")["checkpoint"]["pointer"]
    assert pointer["step"] == report.last_step == report.audit.steps


def test_a_node_lost_while_the_table_is_away(run):
    report = run("table=outage@step:25/8s,kill=rank0@step:40", "--epochs", "8", "--gather", "2")
    back = report.faults[0].time + 8
    *_, reopened = [event for event in events(report) if isinstance(event, RoundReopened)]
    assert reopened.lost == report.faults[1].nodes
    assert -0.5 < reopened.time - back < 30  # as soon as it can be written
    assert after_gathering(report, 2) == (2, 1)


def test_a_node_added_while_the_table_is_away(run):
    chaos = "kill=node-1@step:12,table=outage@step:25/8s,add@step:27"
    report = run(chaos, "--epochs", "12", "--full", "2")
    assert report.faults[2].time < report.faults[1].time + 8
    assert after_gathering(report, 2) == (2, 1, 2)
    assert nodes(report) == {"node-0": 0, "node-1": -9, "node-2": 0}


@pytest.mark.parametrize("recovery", ["restart", "in_process"])
def test_the_last_node_that_holds_the_state_is_preempted_while_the_table_is_away(run, recovery):
    """No checkpoint is due, and nobody else has the state: it is in the storage for the node that comes."""
    chaos = "table=outage@step:25/24s,kill=node-1@step:30,add@5s,preempt=node-0@5s/20s"
    distribution = ElasticDistribution(recovery=recovery)
    report = run(
        chaos,
        "--epochs",
        "4",
        "--gather",
        "2",
        checkpoint=CheckpointPolicy(every_steps=10_000),
        distribution=distribution,
    )
    assert nodes(report) == {"node-0": 143, "node-1": -9, "node-2": 0}
    *_, restored = [event for event in events(report) if isinstance(event, Restored)]
    assert (restored.node, restored.step >= 30) == ("node-2", True)
    assert report.audit.rolled_back_steps == 0


def test_a_run_that_ends_while_the_table_is_away(run, azurite):
    report = run("table=outage@step:50/15s", "--step-delay", "0.2", "--gather", "2")
    back = report.faults[0].time + 15
    (ended,) = [event for event in events(report) if isinstance(event, RunEnded)]
    assert ended.time > back - 0.5
    assert set(nodes(report).values()) == {0}
    assert rows(azurite, report, ROUND_KEY)[ROUND_KEY]["state"] == "succeeded"
    assert rows(azurite, report, "checkpoint")["checkpoint"]["pointer"]["step"] == 80
    assert after_gathering(report, 2) == (2,)


def test_a_table_that_lies_in_turn_loses_nothing(run, azurite):
    """Three nodes go on, or wait, while nothing of what the table says is true; one is lost to each lie's time."""
    lies = ("missing", "keyless", "refused", "foreign")
    chaos = ",".join(f"table={lie}@{2 + 14 * number}s/12s" for number, lie in enumerate(lies))
    chaos += ",kill=rank0@4s,add@6s,kill=rank0@32s,add@34s"
    report = run(chaos, "--epochs", "13", "--step-delay", "0.25", "--gather", "3", nodes=(1, 3))
    assert report.audit.rolled_back_steps == 0
    assert len(report.faults) == 8, "the run was over before the last lie"
    assert sorted(nodes(report).values()) == [-9, -9, 0, 0, 0]
    last = rows(azurite, report, "checkpoint")["checkpoint"]["pointer"]["step"]
    assert last == report.last_step == report.audit.steps
    calls = map(json.loads, (report.paths.run_dir / "table.jsonl").read_text().splitlines())
    lied = Counter(call["trouble"] for call in calls)
    assert lied.keys() >= {*lies}
    assert max(lied[lie] for lie in lies) < 12 * 3 * 4, "without pauses"


def test_every_call_of_the_whole_run_may_go_wrong(run, azurite, monkeypatch, tmp_path):
    with TableProxy(azurite.endpoint, seed=5, log=tmp_path / "calls.jsonl") as proxy:
        monkeypatch.setenv(VARIABLE, emulator_connection_string(proxy.endpoint))
        proxy.set(Disturbance("any", share=0.05, delay_s=(2.0, 20.0)))
        report = run("kill=rank0@step:25,add@step:40", "--epochs", "12", "--full", "2")
        calls = proxy.exchanges
    assert after_gathering(report, 2) == (2, 1, 2)
    assert any(call.trouble for call in calls), Counter(call.method for call in calls)
    # Each row was inserted by one call alone, however often that call was made.
    inserted = Counter(call.row for call in calls if call.written and call.method == "POST" and call.row)
    assert set(inserted.values()) == {1}
    # Every event in the table is one of those in the nodes' files, and no two rows hold the same one.
    written = [json.dumps(row, sort_keys=True) for row in rows(azurite, report, "event.").values()]
    assert written
    assert len(set(written)) == len(written)
    own = {json.dumps(event.model_dump(mode="json"), sort_keys=True) for event in events(report)}
    assert set(written) <= own
    assert len(rows(azurite, report, MEMBER_PREFIX)) == 3
    assert rows(azurite, report, ROUND_KEY)[ROUND_KEY]["state"] == "succeeded"
