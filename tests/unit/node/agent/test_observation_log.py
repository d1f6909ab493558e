"""What is seen of a script without a session, in the ledger."""

from __future__ import annotations

import time

import pytest

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


def test_what_several_workers_save_before_they_connect_is_no_training(log):
    made, written = log
    made.left(time.time())
    before = time.time()
    made.connecting(record=False)
    made.left(before - 1)
    made.left(0.0)
    assert written() == []
    made.entered(3, 1)
    now = time.time()
    made.left(now)
    assert written() == [("state_saved", 3, pytest.approx(now, abs=1e-4))]
