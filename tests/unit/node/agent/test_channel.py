"""The agent's channel and the session's end of it, on a real socket."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from azureml_elastic.ipc import MessageClient
from azureml_elastic.ipc.worker_messages import Assign, Decide, Prepare, Vote
from azureml_elastic.ledger.events import CheckpointCommitted, Progress, Restored
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY, CheckpointPointer
from tests.support.channels import open_channel
from tests.support.shards import describe
from tests.support.waiting import until

POINTER = {"directory": "step-4", "step": 4, "digest": "d"}


class Worker:
    """A session as far as the wire goes."""

    def __init__(self, channel: Channel, local_rank: int, number: int = 1) -> None:
        self.received: list[dict] = []
        self.closed = threading.Event()
        self.client = MessageClient(
            channel.path,
            on_message=lambda _, message: self.received.append(message),
            on_close=lambda _: self.closed.set(),
        )
        self.client.send({"op": "hello", "rank": local_rank, "local_rank": local_rank, "round": number})


@pytest.fixture
def recorder(tmp_path, table):
    pen = Recorder(tmp_path, "node-0", "inc", table)
    yield pen
    pen.close()


@pytest.fixture
def channel(recorder, table):
    made = open_channel(recorder)
    made.begin(1, 2, CheckpointPointer(table, 1, "x"))
    workers: list[Worker] = []
    made.connect = lambda *arguments: workers.append(Worker(made, *arguments)) or workers[-1]
    yield made
    for worker in workers:
        worker.client.close()
    made.close()


def test_a_local_rank_that_the_node_does_not_have_is_refused(channel):
    assert channel.connect(2).closed.wait(60)
    assert not channel.connect(1).closed.wait(0.05)


def test_steps_commits_and_restores_reach_the_ledger(channel, recorder, table, tmp_path, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.table.checkpoint_pointer._FIRST_WAIT_SECONDS", 30.0)
    worker = channel.connect(0)
    assert worker.client.request({"op": "pointer"}, 10) == {"re": 1, "op": "pointer_reply"}
    worker.client.send({"op": "restored", "step": 0, "directory": None})
    worker.client.send({"op": "step", "step": 4})
    assert worker.client.request({"op": "commit", **POINTER, "seconds": 0.5}, 30)["op"] == "accepted"
    assert worker.client.request({"op": "pointer"}, 10)["pointer"] == POINTER
    assert table.get(CHECKPOINT_KEY).value["pointer"] == POINTER
    assert channel.workers.step == 4
    recorder.close()
    events = read_events(tmp_path / "events")
    kinds = [type(event) for event in events]
    assert kinds == [Restored, Progress, CheckpointCommitted]
    assert len(list(table.query("event."))) == 2  # steps are too many for the table


@pytest.mark.parametrize("ends", ["the next round", "the node"])
def test_steps_that_a_worker_still_trains_after_the_end_of_its_round_are_in_the_ledger(
    channel, recorder, tmp_path, ends
):
    worker = channel.connect(0)
    worker.client.send({"op": "step", "step": 4})
    until(lambda: channel.workers.step == 4)
    channel.record_last_step()  # the round is over, and the worker has not read that yet
    for step in (5, 6, 7):
        worker.client.send({"op": "step", "step": step})
    until(lambda: channel.workers.step == 7)
    if ends == "the node":
        channel.close()
    else:
        channel.begin(2, 2, None, keep=True)
    recorder.close()
    steps = [event for event in read_events(tmp_path / "events") if isinstance(event, Progress)]
    assert [(event.step, event.round) for event in steps if event.last] == [(4, 1), (7, 1)]


def test_workers_answer_a_proposal_and_stop(channel):
    workers = [channel.connect(rank) for rank in range(2)]
    until(lambda: channel.workers.in_session)
    assert channel.workers.report().present == {0, 1}
    channel.workers.send(Prepare(1, 9, "leave"))
    until(lambda: all(worker.received for worker in workers))
    for rank, worker in enumerate(workers):
        worker.client.send({"op": "vote", "boundary": 1, "ok": True, "step": 7 + rank})
    votes: list[tuple[int, Vote]] = []
    until(lambda: votes.extend(channel.workers.take_votes()) or len(votes) == 2)
    assert sorted(votes, key=lambda each: each[0]) == [(0, Vote(1, ok=True, step=7)), (1, Vote(1, ok=True, step=8))]
    channel.workers.send(Decide(1, go=True))
    until(lambda: all(worker.received[-1]["op"] == "decide" for worker in workers))
    assert not channel.workers.report().stopped
    for worker in workers:
        worker.client.send({"op": "stopped", "step": 9})
    until(lambda: channel.workers.report().stopped == {0, 1})


def test_a_worker_of_an_older_round_is_cut_off_and_cannot_commit_under_the_new_fence(channel, table):
    worker = channel.connect(0)
    assert worker.client.request({"op": "pointer"}, 10) == {"re": 1, "op": "pointer_reply"}
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


def test_a_state_is_kept_until_the_next_round_has_it(channel, table):
    worker = channel.connect(0)
    descriptor = os.memfd_create("state")
    os.write(descriptor, b"weights")
    answer = worker.client.request({"op": "hand_over", "pid": os.getpid(), "fd": descriptor, "step": 7}, 10)
    assert answer["op"] == "accepted"
    os.close(descriptor)
    channel.begin(2, 1, CheckpointPointer(table, 2, "x"))
    heir = channel.connect(0, 2)
    (kept,) = heir.client.request({"op": "memory"}, 10)["states"]
    assert (kept["step"], kept["round"], kept["rank"]) == (7, 1, 0)
    assert Path(kept["path"]).read_bytes() == b"weights"
    heir.client.send({"op": "restored", "step": 7, "directory": "memory"})
    assert heir.client.request({"op": "memory"}, 10)["states"] == [kept]
    heir.client.send({"op": "step", "step": 8})
    assert not heir.client.request({"op": "memory"}, 10).get("states")


def test_a_descriptor_that_is_gone_is_refused(channel):
    worker = channel.connect(0)
    answer = worker.client.request({"op": "hand_over", "pid": os.getpid(), "fd": 1_000_000, "step": 7}, 10)
    assert answer["error"] == "unavailable"


def test_a_shard_for_a_rank_that_there_is_not_is_refused_and_one_of_an_older_round_too(channel):
    worker = channel.connect(0)
    request = {"op": "replicate_shard", "folder": "step-4", "file": "rank-00000.safetensors", "rank": 9}
    assert "no rank 9" in worker.client.request(request, 20)["message"]
    channel.begin(2, 2, None, keep=True)
    assert worker.client.request(request, 20)["message"] == "Round 1 is over."
    assert not worker.closed.is_set(), "a worker that stays over rounds goes on"


def test_parked_workers_receive_their_assignments_and_others_are_interrupted(channel, table):
    parked, other = channel.connect(0, 0), channel.connect(1, 0)
    parked.client.send({"op": "parked"})
    until(lambda: channel.workers.parked == {0})
    assert channel.workers.leaving
    channel.workers.interrupt()
    until(lambda: other.received)
    other.client.send({"op": "parked"})
    until(lambda: channel.workers.parked == {0, 1})
    assert not channel.workers.leaving
    channel.begin(5, 2, CheckpointPointer(table, 5, "x"), keep=True)
    channel.workers.assign({rank: Assign(5, rank + 4, 6, {}) for rank in range(2)})
    until(lambda: parked.received and len(other.received) == 2)
    assert [message["op"] for message in other.received] == ["interrupt", "assign"]
    (place,) = parked.received
    assert (place["round"], place["rank"], place["world_size"]) == (5, 4, 6)
    assert not channel.workers.parked
    parked.client.send({"op": "step", "step": 3})
    until(lambda: channel.workers.step == 3)


def test_parked_workers_hand_over_before_they_are_stopped(channel):
    parked, busy = channel.connect(0, 0), channel.connect(1, 0)
    parked.client.send({"op": "parked"})
    until(lambda: channel.workers.parked == {0} and channel.workers.in_session)
    channel.workers.release()
    until(lambda: parked.received and len(busy.received) == 2)
    assert [message["op"] for message in parked.received + busy.received] == ["leave", "leave", "interrupt"]
    assert channel.workers.leaving
    channel.begin(0, 1, None)
    channel.connect(0, 0).client.send({"op": "parked"})
    until(lambda: channel.workers.parked == {0})
    assert not channel.workers.leaving, "that was for those before"


def test_workers_of_one_round_are_only_interrupted(channel):
    worker = channel.connect(0)
    until(lambda: channel.workers.leaving)
    channel.workers.release()
    until(lambda: worker.received)
    assert [message["op"] for message in worker.received] == ["interrupt"]


def test_a_worker_that_comes_after_the_end_of_its_round_neither_waits_for_it_nor_is_waited_for(channel):
    """It ignores SIGTERM already: it waited 15 s for its peers, and the agent up to 30 s for its end."""
    channel.workers.interrupt()
    late = channel.connect(0)
    until(lambda: [message["op"] for message in late.received] == ["interrupt"])
    channel.workers.release()
    assert channel.connect(1).closed.wait(60)


def test_a_worker_says_itself_that_it_has_not_failed(channel):
    """Its exit code says nothing: a script may end with any."""
    leaver, _ = channel.connect(0), channel.connect(1)
    leaver.client.send({"op": "gave_way"})
    until(lambda: channel.workers.report().gave_way == {0})
    leaver.client.close()
    until(lambda: channel.workers.report().present == {1})
    assert channel.workers.report().gave_way == {0}
    channel.begin(2, 2, None)
    assert not channel.workers.report().gave_way


def test_a_worker_that_has_died_while_it_waited_gets_no_place(channel, table):
    alive, dying = channel.connect(0, 0), channel.connect(1, 0)
    for worker in (alive, dying):
        worker.client.send({"op": "parked"})
    until(lambda: channel.workers.parked == {0, 1})
    dying.client.close()
    until(lambda: channel.workers.parked == {0})
    channel.begin(5, 2, None, keep=True)
    channel.workers.assign({rank: Assign(5, rank, 2, {}) for rank in range(2)})
    until(lambda: alive.received)
    assert alive.received[0]["op"] == "assign"


def test_when_training_began_and_how_far_it_is_expected_to_go(channel):
    worker = channel.connect(0)
    assert channel.workers.report().pace is None
    worker.client.send({"op": "restored", "step": 10, "directory": None})
    worker.client.send({"op": "expects", "steps": 20})
    worker.client.send({"op": "step", "step": 15})
    until(lambda: channel.workers.step == 15)
    report = channel.workers.report({1: -9})
    assert (report.pace.step, report.expected, report.step, report.trained) == (10, 20, 15, True)
    assert report.exit_codes == {1: -9}


SHARD = asdict(describe("step-4", b"content"))
HOLD = {"op": "hold_shard", "id": 1, "pid": 1, "fd": 1}
NESTED = b'{"op":"step","step":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MALFORMED = {
    **{
        str(fields): fields
        for fields in (
            {},
            {"op": 5},
            {"op": "unknown"},
            {"op": "step"},
            {"op": "step", "step": "many"},
            {"op": "step", "step": [7]},
            {"op": "busy", "bounded": {}},
            {"op": "vote", "boundary": 1, "ok": True},
            {"op": "restored", "step": 7, "directory": 3},
            {"op": "hand_over", "pid": 1, "fd": "none", "step": 7},
            {"op": "hold_shard", "pid": 1, "fd": 1, "shard": {"folder": "a"}},
            {"op": "hello", "local_rank": None, "rank": 0, "round": 1},
            {"op": "hello", "local_rank": -1, "rank": 0, "round": 1},
            {"op": "step", "step": -(2**70)},
        )
    },
    "without the request's id": {"op": "pointer"},
    "nested": NESTED,
    "surrogate": b'{"op":"damaged","directory":"\\ud800","problems":""}',
    "long directory": {"op": "restored", "step": 1, "directory": "x" * 20_000},
    "long problems": {"op": "damaged", "directory": "d", "problems": "x" * 900_000},
    "long operation": {"op": "x" * 900_000},
    "many problems": {"op": "assign" * 3, "environment": [1] * 100_000},
    "infinite pause": b'{"op":"commit","id":1,"directory":"d","step":1,"digest":"","seconds":1e999}',
    "no pause": b'{"op":"commit","id":1,"directory":"d","step":1,"digest":"","seconds":NaN}',
    "negative pause": {"op": "commit", "id": 1, "directory": "d", "step": 1, "digest": "", "seconds": -1.0},
    "above the folder": {**HOLD, "shard": {**SHARD, "folder": ".."}},
    "another folder": {**HOLD, "shard": {**SHARD, "folder": "/home/user"}},
    "file elsewhere": {**HOLD, "shard": {**SHARD, "file": "../../x"}},
    "file with a null": {**HOLD, "shard": {**SHARD, "file": "a\0b"}},
    "no size": {**HOLD, "shard": {"folder": "a", "file": "b"}},
    "negative size": {**HOLD, "shard": {**SHARD, "size": -1}},
    "surrogate in a shard": b'{"op":"hold_shard","id":1,"pid":1,"fd":1,"shard":%s}'
    % json.dumps({**SHARD, "file": "\ud800"}).encode(),
    "retained elsewhere": {"op": "retain_snapshot", "folder": "../.."},
    "reply": {"op": "memory", "id": [1]},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_message_ends_its_connection_with_one_line_and_changes_nothing(channel, caplog, case):
    good, bad = channel.connect(0), channel.connect(1)
    until(lambda: channel.workers.in_session)
    channel.workers.send(Prepare(1, 9, "leave"))
    message = MALFORMED[case]
    line = message if isinstance(message, bytes) else json.dumps(message).encode()
    bad.client.connection.send_line(line + b"\n")
    assert bad.closed.wait(20)
    good.client.send({"op": "step", "step": 4})
    until(lambda: channel.workers.step == 4)
    assert not good.closed.is_set()
    assert channel.workers.take_votes() == []
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info is None
    assert len(record.getMessage()) < 1000
