"""Whole runs of a script without a session: when a new node is let in."""

from __future__ import annotations

import re

import pytest

from azureml_elastic.ledger.events import RanksConnecting, RoundReopened, StateSaved
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING

PROGRAM = str(PROGRAMS / "saving.py")


@pytest.mark.parametrize(
    ("way", "reasons"), [("reads", ["lost node-1", "joining: node-2"]), ("blind", ["lost node-1"])]
)
def test_a_new_node_stops_a_script_only_after_a_save_that_it_continues_from(tmp_path, monkeypatch, way, reasons):
    """The save is in a folder that an environment variable names, and follows the one before within milliseconds."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("STATE_FOLDER", str(folder))
    cluster = LocalCluster(
        (1, 2),
        chaos=parse_schedule("kill=node-1@1s,add@1s"),
        rendezvous=GATHERING,
        run_dir=tmp_path / "run",
        start=FORKED,
        timeout=120,
    )
    log = tmp_path / "run" / "logs" / "node-0.log"
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
        assert not any(isinstance(event, StateSaved) for event in events)
    # What was kept of a round before the last one is known by a save that the script has looked for.
    spans = report.spans(events)
    last = max(event.round for event in events)
    assert {event.round for event in events if isinstance(event, RanksConnecting)} == set(range(1, last + 1))
    assert {span.round for span in spans if span.activity == "unknown"} == (set() if way == "reads" else {1})
    assert {span.round for span in spans if span.activity == "training"} == ({1, 2, 3} if way == "reads" else {2})
    (recovery,) = report.recoveries
    assert (recovery.resumed, recovery.step, recovery.lost) == (2, None, ("node-1",))
