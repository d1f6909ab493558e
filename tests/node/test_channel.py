"""The agent's channel and the session's end of it, on a real socket."""

from __future__ import annotations

import threading
import time

import pytest

from azureml_elastic.ledger.events import CheckpointCommitted, Progress, Restored
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.node.channel import Channel
from azureml_elastic.node.checkpoints import CHECKPOINT_KEY, CheckpointPointer
from azureml_elastic.node.recorder import Recorder
from azureml_elastic.node.table import open_table
from azureml_elastic.spec import TableRendezvous
from azureml_elastic.wire import LineClient

POINTER = {"directory": "step-4", "step": 4, "digest": "d"}


class Worker:
    """A session as far as the wire goes."""

    def __init__(self, channel: Channel, local_rank: int, number: int = 1) -> None:
        self.heard: list[dict] = []
        self.closed = threading.Event()
        self.client = LineClient(
            channel.path,
            on_message=lambda _, message: self.heard.append(message),
            on_close=lambda _: self.closed.set(),
        )
        self.client.send({"op": "hello", "rank": local_rank, "local_rank": local_rank, "pid": 1, "round": number})


def until(condition) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture
def table(tmp_path):
    opened = open_table(TableRendezvous(endpoint=str(tmp_path / "t.sqlite")), "run", {})
    yield opened
    opened.close()


@pytest.fixture
def recorder(tmp_path, table):
    pen = Recorder(tmp_path, "node-0", "inc", table)
    yield pen
    pen.close()


@pytest.fixture
def channel(recorder, table):
    made = Channel(recorder, lambda: None)
    made.begin(1, 2, CheckpointPointer(table, 1, "x"))
    workers: list[Worker] = []
    made.connect = lambda *arguments: workers.append(Worker(made, *arguments)) or workers[-1]
    yield made
    for worker in workers:
        worker.client.close()
    made.close()


def test_steps_commits_and_restores_reach_the_ledger(channel, recorder, table, tmp_path):
    worker = channel.connect(0)
    assert worker.client.request({"op": "pointer"}, 10)["pointer"] is None
    worker.client.send({"op": "restored", "step": 0, "directory": None})
    worker.client.send({"op": "step", "step": 4})
    assert worker.client.request({"op": "commit", **POINTER, "seconds": 0.5}, 10)["ok"]
    assert worker.client.request({"op": "pointer"}, 10)["pointer"] == POINTER
    assert table.get(CHECKPOINT_KEY).value["pointer"] == POINTER
    assert channel.step == 4
    recorder.close()
    events = read_events(tmp_path / "events")
    kinds = [type(event) for event in events]
    assert kinds == [Restored, Progress, CheckpointCommitted]
    assert len(list(table.query("event."))) == 2  # steps are too many for the table


def test_a_boundary_is_agreed_when_all_local_workers_promise(channel):
    workers = [channel.connect(rank) for rank in range(2)]
    until(lambda: channel.in_session)
    channel.prepare({"op": "prepare", "boundary": 1, "step": 9, "action": "leave"})
    until(lambda: all(worker.heard for worker in workers))
    workers[0].client.send({"op": "prepared", "boundary": 1, "ok": True, "step": 7})
    assert channel.take_reports() == []
    workers[1].client.send({"op": "prepared", "boundary": 1, "ok": True, "step": 8})
    reports: list[dict] = []
    until(lambda: reports.extend(channel.take_reports()) or reports)
    assert reports[0]["ok"]
    assert reports[0]["step"] == 8
    channel.decide({"op": "decide", "boundary": 1, "go": True})
    until(lambda: all(worker.heard[-1]["op"] == "decide" for worker in workers))
    assert not channel.stopped
    for worker in workers:
        worker.client.send({"op": "stopped", "step": 9})
    until(lambda: channel.stopped == {0, 1})


def test_workers_without_sessions_cannot_promise_anything(channel):
    channel.connect(0)
    channel.prepare({"op": "prepare", "boundary": 1, "step": 9, "action": "leave"})
    (report,) = channel.take_reports()
    assert not report["capable"]
    assert not report["ok"]


def test_a_worker_of_an_older_round_is_cut_off_and_cannot_commit_under_the_new_fence(channel, table):
    worker = channel.connect(0)
    assert worker.client.request({"op": "pointer"}, 10)["pointer"] is None
    channel.begin(2, 2, CheckpointPointer(table, 2, "x"))
    assert worker.closed.wait(20)
    late = channel.connect(1, 1)
    assert late.closed.wait(20)
    assert table.get(CHECKPOINT_KEY).value["pointer"] is None


def test_only_rank_0_commits(channel):
    channel.begin(3, 1, None)
    worker = channel.connect(0, 3)
    reply = worker.client.request({"op": "commit", **POINTER, "seconds": 0.1}, 10)
    assert reply["error"] == "fenced"
