"""Whole runs of a script without a session: when a new node is let in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.ledger.events import RanksConnecting, RoundReopened, StateSaved
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.local.node_start import NodeStart
from tests.support.node_server import FORKED, StartAt
from tests.support.paths import PROGRAMS
from tests.support.waiting import until
from tests.support.whole_runs import GATHERING

PROGRAM = str(PROGRAMS / "saving.py")


def with_a_newcomer(tmp_path, monkeypatch, start: NodeStart = FORKED) -> tuple[LocalCluster, Path]:
    """Return a cluster that loses a node and gets another one, with the log of rank 0's node."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("STATE_FOLDER", str(folder))
    cluster = LocalCluster(
        (1, 2),
        chaos=parse_schedule("kill=node-1@1s,add@1s"),
        rendezvous=GATHERING,
        run_dir=tmp_path / "run",
        start=start,
        timeout=120,
    )
    return cluster, tmp_path / "run" / "logs" / "node-0.log"


@pytest.mark.parametrize(
    ("way", "reasons"), [("reads", ["lost node-1", "joining: node-2"]), ("blind", ["lost node-1"])]
)
def test_a_new_node_stops_a_script_only_after_a_save_that_it_continues_from(tmp_path, monkeypatch, way, reasons):
    """The save is in a folder that an environment variable names, and follows the one before within milliseconds."""
    cluster, log = with_a_newcomer(tmp_path, monkeypatch)
    report = cluster.run(["python", PROGRAM, way, str(log)])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    events = read_events(tmp_path / "run" / "events")
    assert [event.reason for event in events if isinstance(event, RoundReopened)] == reasons
    text = log.read_text()
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", text)]
    if way == "reads":
        assert 0 == begun[0] < begun[1] < begun[2]
        assert report.world_sizes == (2, 1, 2)
        assert {event.round for event in events if isinstance(event, StateSaved)} == {1, 2}
    else:
        assert begun == [0, 0]
        assert "It has not looked for a saved state at its start" in text
        assert text.count("trains all its steps again, as it has not looked for a saved state") == 1
        assert not any(isinstance(event, StateSaved) for event in events)
    # What was kept of a round before the last one is known by a save that the script has looked for.
    spans = report.spans(Picture.of(events))
    last = max(event.round for event in events)
    assert {event.round for event in events if isinstance(event, RanksConnecting)} == set(range(1, last + 1))
    assert {span.round for span in spans if span.activity == "unknown"} == (set() if way == "reads" else {1})
    assert {span.round for span in spans if span.activity == "training"} == ({1, 2, 3} if way == "reads" else {2})
    (recovery,) = report.recoveries
    assert (recovery.resumed, recovery.step, recovery.lost) == (2, None, ("node-1",))


def test_no_node_is_let_in_after_the_last_save(tmp_path, monkeypatch):
    """All epochs would be trained again, and the run would succeed."""
    cluster, log = with_a_newcomer(tmp_path, monkeypatch)
    report = cluster.run(["python", str(PROGRAMS / "exporting.py"), str(log)])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    events = read_events(tmp_path / "run" / "events")
    assert [event.reason for event in events if isinstance(event, RoundReopened)] == ["lost node-1"]
    (last,) = re.findall(r"ends after epoch (\d+)", log.read_text())
    assert int(last) > 0
    assert log.read_text().count("It has looked for ") == 1, "what it does without a session is said once"
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"averaged.pt", "exported.pt", "final.pt"}


def test_what_fails_with_the_same_error_is_tried_with_the_nodes_that_wait(tmp_path, monkeypatch):
    def hold_back(environ):
        if environ[variables.NODE_ID] == "node-2":
            until((tmp_path / "state" / "started-again").exists)
        return {}

    cluster, log = with_a_newcomer(tmp_path, monkeypatch, StartAt(more=hold_back))
    report = cluster.run(["python", str(PROGRAMS / "needs_two.py"), str(log)])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.world_sizes == (2, 1, 2)
    assert "the world size changes from 1 to 2, as nodes wait" in log.read_text()
    assert "loaded by 2" in log.read_text()
