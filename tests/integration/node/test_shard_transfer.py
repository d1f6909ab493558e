"""Shards of snapshots on their way from one node's agent to another's, over the port of its hub."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

from azureml_elastic.ipc import KEY_BYTES, Authenticator, Peer
from azureml_elastic.ipc.connection import MessageStream
from azureml_elastic.ipc.tls import derive_credentials
from azureml_elastic.ipc.worker_messages import Accepted, Memory, ReplicateShard
from azureml_elastic.node.agent.shard_transfer import ShardSender
from azureml_elastic.node.core import messages
from tests.support.rendezvous.sealed_run import SHARD_SECONDS, SHARD_TRANSFERS, Run, encoded
from tests.support.shards import describe, memory_of
from tests.support.waiting import until

CONTENT = os.urandom(3_500_000)
TAIL = b"the manifest"
SECRET = b"weights that nobody else may see"


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "table.sqlite")
    yield made
    made.close()


class Node:
    """The sending node: rank 0 of the run, which has a shard for rank 1."""

    def __init__(self, run, authenticator=None):
        ranks = [run.round.rank_of(node.node, node.incarnation) for node in run.nodes]
        self.sending, self.receiving = ranks.index(0), ranks.index(1)
        self.target = run.memories[self.receiving]
        self.memory = run.memories[self.sending]
        self.members = run.round.members
        self.sender = ShardSender(self.memory, authenticator or run.nodes[self.sending].authenticator, SHARD_SECONDS)
        self.sender.begin(self.members)

    def hold(self, content=CONTENT, tail=TAIL, **changed):
        shard = describe("step-1", content, tail, **changed)
        self.memory.hold(memory_of(content + tail), shard)
        return shard

    def submit(self, shard, rank=1):
        """Have the shard sent, and return the event of the reply and the list that it will be in."""
        arrived, replies = threading.Event(), []
        request = ReplicateShard(shard.folder, shard.file, rank)
        self.sender.submit(request, lambda reply: replies.append(reply) or arrived.set())
        return arrived, replies

    def send(self, shard, rank=1):
        arrived, replies = self.submit(shard, rank)
        assert arrived.wait(300)
        return replies[0]

    def received(self):
        held = self.target.answer(Memory(), 1, 0).shards
        return {each.file: Path(each.path).read_bytes() for each in held}

    def offer(self, run, shard):
        """Offer a shard by hand, and return the stream of the answer."""
        member = self.members[1]
        authenticator = run.nodes[self.sending].authenticator
        to = Peer(member.node, member.incarnation)
        stream = MessageStream.connect((member.host, member.hub_port), authenticator, to, 20)
        stream.send(encoded(messages.ShardOffer(shard)))
        return stream


@pytest.fixture
def node(run):
    made = Node(run)
    yield made
    made.sender.close()


def answer(stream):
    """Return the first message that is neither a heartbeat nor a change of the round."""
    while True:
        message = messages.CODEC.decode(stream.receive())
        if not isinstance(message, messages.Beat | messages.RoundChanged):
            return message


def test_the_other_agent_holds_the_shard_and_what_follows_it(node, run):
    shard = node.hold()
    assert node.send(shard) == Accepted()
    assert node.received() == {shard.file: CONTENT + TAIL}
    run.assert_unharmed()


def test_shards_of_several_workers_travel_at_the_same_time(node):
    shards = [node.hold(os.urandom(1 << 20), b"", rank=rank) for rank in range(8)]
    waiting = [node.submit(shard) for shard in shards]
    for arrived, replies in waiting:
        assert arrived.wait(300)
        assert replies == [Accepted()]
    assert node.received().keys() == {shard.file for shard in shards}


def test_a_shard_that_has_changed_on_the_way_is_not_held(node):
    shard = node.hold(xxh3="0" * 32)
    reply = node.send(shard)
    assert "changed on the way" in reply.message
    assert node.received() == {}


def test_memory_that_ends_too_early_is_not_held(node):
    shard = node.hold(size=len(CONTENT) + 1000)
    assert "ends before" in node.send(shard).message
    assert node.received() == {}


def test_a_shard_for_which_there_is_no_memory_is_refused_at_once(node, run):
    shard = node.hold(size=1 << 50)
    assert "no memory for it" in node.send(shard).message
    assert node.received() == {}
    run.assert_unharmed()


def test_a_shard_that_is_no_longer_held_is_refused(node):
    assert "does not hold" in node.send(describe("step-1", b"x")).message


def test_a_rank_that_the_round_does_not_have_is_refused(node):
    assert "no rank 7 among the 2" in node.send(node.hold(), rank=7).message


def test_a_node_without_the_key_of_the_run_cannot_send(run):
    node = Node(run, Authenticator(Peer("node-0", "i-0"), "hub", bytes(KEY_BYTES)))
    try:
        reply = node.send(node.hold())
    finally:
        node.sender.close()
    assert "does not hold the run's key" in reply.message
    assert node.received() == {}


def test_another_process_at_the_port_of_the_node_is_refused(node, run):
    receiver = node.members[1]
    node.members = (node.members[0], type(receiver)(**{**vars(receiver), "incarnation": "started again"}))
    node.sender.begin(node.members)
    assert "another process" in node.send(node.hold()).message
    assert node.received() == {}
    run.assert_unharmed()


class Proxy:
    """An attacker between two nodes, who reads and may change all bytes.

    Args:
        address: address of the receiving node.
        change: function of the direction and the bytes that returns the bytes to pass on.
    """

    def __init__(self, address, change=lambda _, data: data):
        self.seen = bytearray()
        self._change = change
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self):
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.create_connection(self._address)
            self._sockets += [client, server]
            for direction, source, target in (("out", client, server), ("back", server, client)):
                self._threads.append(threading.Thread(target=self._pump, args=(direction, source, target)))
                self._threads[-1].start()

    def _pump(self, direction, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self._change(direction, data))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def between(node):
    """Place an attacker between the nodes."""
    proxies = []

    def place(change=lambda _, data: data):
        receiver = node.members[1]
        proxies.append(Proxy((receiver.host, receiver.hub_port), change))
        member = type(receiver)(**{**vars(receiver), "host": "127.0.0.1", "hub_port": proxies[-1].port})
        node.members = (node.members[0], member)
        node.sender.begin(node.members)
        return proxies[-1]

    yield place
    for proxy in proxies:
        proxy.close()


def test_who_reads_the_network_does_not_see_the_shard(node, between):
    proxy = between()
    content = SECRET * 1000
    shard = node.hold(content)
    assert node.send(shard) == Accepted()
    assert node.received() == {shard.file: content + TAIL}
    assert len(proxy.seen) > len(content)
    assert SECRET not in proxy.seen
    assert TAIL not in proxy.seen


def test_changed_bytes_are_refused(node, between):
    sent = 0

    def change(direction, data):
        nonlocal sent
        sent += len(data) if direction == "out" else 0
        return data[:-1] + bytes([data[-1] ^ 1]) if direction == "out" and sent > 1_000_000 else data

    between(change)
    assert node.send(node.hold()).error == "unavailable"
    assert node.received() == {}


def test_a_torn_transfer_is_refused(node, between):
    sent = 0

    def change(direction, data):
        nonlocal sent
        sent += len(data) if direction == "out" else 0
        if sent > 1_000_000:
            raise OSError(errno.ECONNRESET, "torn")
        return data

    between(change)
    assert node.send(node.hold()).error == "unavailable"
    assert node.received() == {}


def test_the_end_of_the_round_ends_a_transfer(node, between):
    go_on = threading.Event()

    def change(direction, data):
        if direction == "out" and len(data) > 10_000:
            go_on.wait(300)
        return data

    proxy = between(change)
    arrived, replies = node.submit(node.hold(SECRET * 1_000_000))
    until(lambda: len(proxy.seen) > 10_000)
    assert not arrived.is_set()
    node.sender.begin(())
    assert arrived.wait(SHARD_SECONDS / 2), "it does not wait for the timeout"
    assert replies[0].error == "unavailable"
    go_on.set()
    assert node.received() == {}


def test_a_receiver_that_does_nothing_is_given_up(run):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = Node(run)
        node.sender.close()
        node.sender = ShardSender(node.memory, run.nodes[0].authenticator, 0.2)
        receiver = node.members[1]
        member = type(receiver)(**{**vars(receiver), "hub_port": silent.getsockname()[1]})
        node.sender.begin((node.members[0], member))
        assert "timed out" in node.send(node.hold()).message
        node.sender.close()


def test_another_client_than_the_one_that_has_offered_the_shard_is_refused(node, run, tmp_path):
    """Who takes over the connection after the handshake cannot open TLS in it, even with the run's key."""
    content = b"forged"
    stream = node.offer(run, describe("step-1", content))
    assert isinstance(answer(stream), messages.ShardReady)
    (tmp_path / "key.pem").write_bytes(derive_credentials(run.nodes[0].authenticator.key, "connection"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(tmp_path / "key.pem")
    with context.wrap_socket(stream._sock) as taken_over, pytest.raises(OSError, match=r"(?i)alert|closed|reset|EOF"):  # noqa: PT012 - either call may be the one that fails
        taken_over.sendall(content)
        if not taken_over.recv(100):
            raise ConnectionError("closed")
    stream.close()
    assert node.received() == {}
    run.assert_unharmed()


def test_bytes_without_tls_are_refused(node, run):
    with contextlib.closing(node.offer(run, describe("step-1", b"content"))) as stream:
        assert isinstance(answer(stream), messages.ShardReady)
        # A TLS alert, which is no message, or the end of the connection, which sending may meet already.
        with pytest.raises((OSError, ValueError)):  # noqa: PT012 - either call may be the one that fails
            stream.send_bytes(memoryview(b"content"))
            stream.receive()
    assert node.received() == {}
    run.assert_unharmed()


def test_offers_that_nothing_follows_are_bounded_and_given_up(node, run):
    streams = [node.offer(run, describe("step-1", b"content", rank=rank)) for rank in range(SHARD_TRANSFERS + 1)]
    *accepted, refused = streams
    assert all(isinstance(answer(stream), messages.ShardReady) for stream in accepted)
    with pytest.raises(OSError, match=r"closed|reset"):
        answer(refused)
    refused.close()
    run.assert_unharmed()
    for stream in accepted:  # the receiver waits no longer than its timeout
        with pytest.raises(OSError, match=r"closed|reset"):
            stream.receive()
        stream.close()
    assert node.send(node.hold()) == Accepted()


def test_a_node_that_ends_does_not_wait_for_transfers(tmp_path):
    run = Run(tmp_path / "table.sqlite")
    node = Node(run)
    stream = node.offer(run, describe("step-1", b"content"))
    assert isinstance(answer(stream), messages.ShardReady)
    run.close()
    node.sender.close()
    with pytest.raises(OSError, match=r"closed|reset"):
        stream.receive()
    stream.close()
