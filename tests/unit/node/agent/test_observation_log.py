"""What is seen of a script without a session, in the ledger."""

from __future__ import annotations

import os
import tempfile
import time

import pytest

from azureml_elastic.forks.state_lookups import Lookups
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.node.agent.event_logs import ObservationLog
from azureml_elastic.node.records.event_recorder import Recorder


@pytest.fixture
def log(tmp_path):
    """Return the log of a node that has entered its second round, and a function that returns what it has written."""
    recorder = Recorder(tmp_path, "a", "1", None)
    made = ObservationLog(recorder)
    made.entered(2, 4)
    yield made, lambda: [(each.kind, each.round, each.time) for each in read_events(tmp_path / "events")]
    recorder.close()


@pytest.mark.parametrize("leads", [True, False])
def test_the_connection_is_written_once_by_rank_0s_node(log, leads):
    made, written = log
    began = time.time()
    made.connecting(record=leads)
    made.connecting(record=leads)
    assert [(kind, number) for kind, number, _ in written()] == ([("ranks_connecting", 2)] if leads else [])
    assert all(began <= at <= time.time() for _, _, at in written())


def test_what_several_workers_save_before_they_connect_is_no_training(log, tmp_path):
    made, written = log
    saved = Lookups(frozenset({str(tmp_path / "prepared.pt")}))
    (tmp_path / "prepared.pt").write_bytes(b"x")
    assert made.left(saved) is None
    made.entered(3, 1)
    now = time.time()
    os.utime(tmp_path / "prepared.pt", (now, now))
    made.left(saved).join()
    assert [(kind, number) for kind, number, _ in written()] == [("state_saved", 3)]


def test_files_that_libraries_leave_in_the_temporary_folder_are_no_saves(log, tmp_path, monkeypatch):
    made, written = log
    made.connecting(record=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    now = time.time()
    for path in (tmp_path / "error.pickle", tmp_path / "state.pt"):
        path.write_bytes(b"x")
        os.utime(path, (now, now))
    made.left(Lookups(frozenset({str(tmp_path / "error.pickle")}))).join()
    assert written() == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    made.left(Lookups(frozenset({str(tmp_path / "state.pt")}))).join()
    assert [kind for kind, _, _ in written()] == ["state_saved"]


def test_the_last_save_since_the_connection_counts_that_the_script_has_looked_for(log, tmp_path):
    made, written = log
    made.connecting(record=False)
    now = time.time()
    paths = {}
    for name, age in {"prepared.bin": 60.0, "first.pt": -0.01, "last.pt": -0.02, "skewed.pt": -3600.0}.items():
        paths[name] = tmp_path / "state" / name
        paths[name].parent.mkdir(exist_ok=True)
        paths[name].write_bytes(b"x")
        os.utime(paths[name], (now - age, now - age))
    while time.time() < now + 0.03:
        time.sleep(0.01)
    made.left(Lookups(frozenset(map(str, (paths["first.pt"], paths["prepared.bin"]))))).join()
    made.left(Lookups(folders=frozenset({str(tmp_path / "state")}))).join()
    made.left(Lookups(frozenset({str(paths["prepared.bin"]), str(tmp_path / "missing.pt")}))).join()
    found = [(kind, number, pytest.approx(at - now, abs=1e-4)) for kind, number, at in written()]
    assert found == [("state_saved", 2, 0.01), ("state_saved", 2, 0.02)]
