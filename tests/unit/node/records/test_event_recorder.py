"""The ledger's pen never stops the run."""

from __future__ import annotations

import threading

from azureml_elastic.ledger.events import NodeStarted
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.node.records.event_recorder import Recorder


def test_events_are_lines_at_once(tmp_path):
    pen = Recorder(tmp_path, "node-0", "inc", None)
    pen.record(NodeStarted, 0, host="h", pid=1)
    (event,) = read_events(tmp_path / "events")
    assert (event.kind, event.node, event.pid) == ("node_started", "node-0", 1)
    pen.close()
    pen.record(NodeStarted, 0, host="h", pid=2)  # too late, and no harm
    assert len(read_events(tmp_path / "events")) == 1


def test_a_full_disk_is_reported_once_and_survived_and_a_subscriber_gets_each_event(tmp_path, caplog):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "node-0.jsonl").symlink_to("/dev/full")
    received = []
    pen = Recorder(tmp_path, "node-0", "inc", None, received.append)
    for pid in range(3):
        pen.record(NodeStarted, 0, host="h", pid=pid)
    pen.close()
    assert caplog.text.count("cannot be written") == 1
    assert [event.pid for event in received] == [0, 1, 2]


def test_many_threads_write_whole_lines(tmp_path):
    pen = Recorder(tmp_path, "node-0", "inc", None)

    def write() -> None:
        for pid in range(50):
            pen.record(NodeStarted, 0, host="h" * 500, pid=pid)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pen.close()
    assert len(read_events(tmp_path / "events")) == 400
