"""What is seen of a script without a session, in the ledger."""

from __future__ import annotations

import time

import pytest

from azureml_elastic.ledger.reading import read_events
from azureml_elastic.node.agent.event_recorder import Recorder
from azureml_elastic.node.agent.observation_log import ObservationLog


def test_each_connection_and_the_last_save_of_each_round_are_recorded(tmp_path):
    now = [1000.0]
    recorder = Recorder(tmp_path, "a", "1", None)
    log = ObservationLog(recorder, lambda: now[0])
    began = time.time()
    log.seen(1, connected_at=None, saved_at=None)
    now[0] = 1001.0
    log.seen(1, connected_at=1000.5, saved_at=None)
    log.seen(1, connected_at=1000.5, saved_at=1000.98)
    now[0] = 1001.01
    for saved in (1000.99, 1001.0):  # soon after the first one
        log.seen(1, connected_at=1000.5, saved_at=saved)
    log.seen(2, connected_at=None, saved_at=None)
    log.flush()
    log.flush()
    recorder.close()
    found = [(event.kind, event.round) for event in read_events(tmp_path / "events")]
    assert found == [("ranks_connecting", 1), ("state_saved", 1), ("state_saved", 1)]
    times = [event.time - began for event in read_events(tmp_path / "events")]
    assert times == pytest.approx([-0.5, -0.02, -0.01], abs=0.4)
