"""Random messages to a hub and to an agent's socket; ``python -m nox -s attack`` sends 100,000.

``ATTACK_MESSAGES`` is their number. Hypothesis prints what reproduces a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import socket
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from azureml_elastic.config import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.ipc import MessageClient
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.table import open_table
from tests.support.channels import open_channel
from tests.support.rendezvous.sealed_run import encoded
from tests.support.waiting import until

MESSAGES = int(os.environ.get("ATTACK_MESSAGES", "2000"))
BATCH = 50

WORDS = ("", "node-0", "node-1", "open", "sealed", "succeeded", "ü", "\0", "x" * 300, "x" * 20_000, "\ud800", "../..")
NUMBERS = (0, 1, 2, -1, 10**9, -(10**12), 2**70, 1e300, 1e999, -1e999, float("nan"))


def random_value(choose, depth=2):
    """Return a JSON value of any type."""
    kind = choose.randrange(7 if depth else 5)
    if kind == 6:
        return {choose.choice(WORDS): random_value(choose, depth - 1) for _ in range(choose.randrange(4))}
    if kind == 5:
        return [random_value(choose, depth - 1) for _ in range(choose.randrange(4))]
    return (None, choose.random() < 0.5, choose.choice(NUMBERS), choose.random(), choose.choice(WORDS))[kind]


def random_message(choose, ops, fields):
    """Return a message with a known or an unknown operation, and fields of any type."""
    names = choose.sample(fields, choose.randrange(min(7, len(fields))))
    op = choose.choice(ops) if choose.random() < 0.95 else random_value(choose)
    return {"op": op, **{name: random_value(choose) for name in names}}


def line_of(message):
    """Return the line of a message that need not be one: with numbers that JSON has not, and halves of characters."""
    return json.dumps(message).encode() + b"\n"


HUB_OPS = (
    "hello", "watch", "done", "report", "unreachable", "reached", "round_changed", "leader_query", "beat", "lost",
    "all_done", "broadcast", "seal_position", "shard_offer", "shard_ready", "shard_held", "shard_refused",
    "x",
)  # fmt: skip
HUB_FIELDS = (
    "round", "is_open", "strikes", "unreached", "candidacy", "body", "text", "incarnation", "nodes", "absent",
    "node", "re", "shard", "reason",
)  # fmt: skip
AGENT_OPS = (
    "hello", "step", "restored", "expects", "pointer", "commit", "hand_over", "memory", "vote",
    "stopped", "parked", "busy", "free", "finished", "damaged", "hold_shard",
    "replicate_shard",    "retain_snapshot", "discard_snapshot", "x",
)  # fmt: skip
AGENT_FIELDS = (
    "rank", "local_rank", "round", "step", "directory", "id", "boundary", "ok", "seconds", "digest", "pid", "fd",
    "steps", "bounded", "shard", "folder", "file", "problems", "re",
)  # fmt: skip


def attack(function):
    """Call a function with random sources, as often as there are batches."""
    repeat = settings(max_examples=max(1, MESSAGES // BATCH), deadline=None, suppress_health_check=list(HealthCheck))
    repeat(given(choose=st.integers(0, 2**64).map(random.Random))(function))()


def random_round(choose):
    number, state = choose.choice([0, 1, 3, 10**9]), choose.choice(["open", "sealed", "succeeded", "failed"])
    return encoded(messages.RoundChanged(Round(number, state)))


class Sender:
    """A client that waits until each message was handled, and connects again whenever it was cut off.

    Args:
        connect: function that connects, with the callbacks for messages and for the end.
        settle: function that waits until the server has handled the last message; raises ``ConnectionError`` if it has
            ended the connection instead.
    """

    def __init__(self, connect, settle):
        self._connect = connect
        self._settle = settle
        self._client = None
        self.cut_off = 0

    def send(self, message):
        if self._client is None:
            self._client = self._connect()
        self._client.connection.send_line(line_of(message))
        try:
            self._settle(self._client)
        except ConnectionError:
            self.cut_off += 1
            self.close()

    def close(self):
        if self._client is not None:
            self._client.close()
            self._client = None


def test_messages_of_a_node_with_the_key(run):
    answers = queue.SimpleQueue()

    def on_message(_, fields):
        if fields["op"] == "leader_answer":
            answers.put(True)

    def connect():
        while not answers.empty():
            answers.get()
        return run.member("intruder", "i-intruder", on_message, lambda _: answers.put(False))

    def settle(client):
        client.send(encoded(messages.LeaderQuery(1)))
        if not answers.get(timeout=60):
            raise ConnectionError

    sender = Sender(connect, settle)

    @attack
    def send(choose):
        for _ in range(BATCH):
            known = choose.random() < 0.1
            sender.send(random_round(choose) if known else random_message(choose, HUB_OPS, HUB_FIELDS))

    sender.close()
    assert sender.cut_off > MESSAGES / 10, "most messages are malformed"
    until(lambda: not run.leader.hub.view().waiting)
    run.assert_unharmed()


def test_bytes_of_a_process_without_the_key(run):
    @attack
    def send(choose):
        with socket.create_connection(run.address, 10) as sock, contextlib.suppress(OSError):
            for _ in range(BATCH):
                sock.sendall(choose.randbytes(choose.randrange(200)))

    run.assert_unharmed()


@pytest.fixture
def channel(tmp_path):
    table = open_table(TableRendezvous(endpoint=str(tmp_path / "t.sqlite")), "run", NodeEnvironment.read({}))
    recorder = Recorder(tmp_path, "node-0", "inc", table)
    made = open_channel(recorder)
    made.begin(1, 2, None)
    yield made
    made.close()
    recorder.close()
    table.close()


def test_messages_to_the_agent(channel):
    def connect():
        client = MessageClient(channel.path, lambda *_: None)
        client.send({"op": "hello", "rank": 1, "local_rank": 1, "round": 1})
        return client

    sender = Sender(connect, lambda client: client.request({"op": "memory"}, 60))

    @attack
    def send(choose):
        for _ in range(BATCH):
            sender.send(random_message(choose, AGENT_OPS, AGENT_FIELDS))

    sender.close()
    assert sender.cut_off > MESSAGES / 10, "most messages are malformed"
    answered = threading.Event()
    worker = MessageClient(channel.path, lambda *_: answered.set())
    worker.send({"op": "hello", "rank": 0, "local_rank": 0, "round": 1})
    assert worker.request({"op": "memory"}, 10)["re"] == 1
    worker.close()


def test_a_round_that_a_member_repeats_or_takes_back_changes_nothing(run):
    member = run.member()
    for number in range(run.round.number + 1):
        for state in ("open", "sealed", "succeeded", "failed"):
            member.send(encoded(messages.RoundChanged(replace(run.round, number=number, state=state))))
    member.flush(10)
    member.close()
    run.assert_unharmed()
