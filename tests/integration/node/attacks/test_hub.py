"""Processes without the run's key, and members that misbehave, against the hubs of a running round.

Each row of the table in ``docs/explanation/security.md`` has its test. The run's outcome must not change.
"""

from __future__ import annotations

import base64
import contextlib
import json
import resource
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from azureml_elastic.ipc import MessageClient
from azureml_elastic.ipc.authentication import Authenticator, Peer
from azureml_elastic.ipc.event_loop import HANDSHAKE_SECONDS
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.actions import Reopen
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.row_keys import RUN_KEY
from tests.support.descriptors import no_free_descriptor
from tests.support.rendezvous.sealed_run import encoded
from tests.support.waiting import until


def packed_bomb():
    """Return a packed row of 600 kB that would need 600 MB, made without that much memory."""
    packer = zlib.compressobj(9)
    packed = [packer.compress(b'{"x":"'), *(packer.compress(b"0" * (1 << 20)) for _ in range(600))]
    return base64.b64encode(b"".join([*packed, packer.compress(b'"}'), packer.flush()])).decode()


def ghost(run):
    return Member("ghost", "i-ghost", host="127.0.0.1", hub_port=1, round=run.round.number + 1)


ATTACKS = {
    "succeeded": lambda run: [encoded(messages.RoundChanged(replace(run.round, state="succeeded")))],
    "failed": lambda run: [
        encoded(messages.RoundChanged(replace(run.round, state="failed", message="x", exit_code=9)))
    ],
    "sealed far ahead": lambda run: [encoded(messages.RoundChanged(replace(run.round, number=10**9)))],
    "open far ahead": lambda _: [encoded(messages.RoundChanged(Round(10**9)))],
    "a member is done": lambda _: [{"op": "member_hello", "node": "node-1", "round": 1}, encoded(messages.Done())],
    "a member goes": lambda _: [{"op": "member_hello", "node": "node-1", "round": 1}],
    "a ghost waits": lambda _: [{"op": "watch", "node": "ghost0", "incarnation": "g", "round": 1}],
    "a candidate without a row": lambda run: [
        encoded(messages.Watch(run.round.number + 1, is_open=True, candidacy=ghost(run)))
    ],
    "wrong types": lambda _: [
        {"op": "watch", "node": "x", "incarnation": "y", "round": 1, "strikes": "many"},
        {"op": "watch", "node": "x", "incarnation": "y", "round": 1, "candidacy": {"node": 5}},
        {"op": "report", "body": [1]},
    ],
    "a packed bomb": lambda _: [{"op": "round_changed", "round": packed_bomb()}],
    "no JSON": lambda _: [],
}
"""The messages with which a process without a key decided a run before connections were authenticated."""


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_process_without_the_key_changes_nothing(run, attack, caplog):
    lines = b"".join(json.dumps(message).encode() + b"\n" for message in ATTACKS[attack](run)) or b"\0{]\n" * 1000
    before = peak_mib()
    with run.connect() as sock:
        with contextlib.suppress(OSError):  # the hub may close the connection before all is sent
            sock.sendall(lines)
            sock.shutdown(socket.SHUT_WR)
        assert_closed(sock)
    run.assert_unharmed()
    assert peak_mib() - before < 64
    assert caplog.text.count("refused a connection") == 1


def assert_closed(sock, timeout=HANDSHAKE_SECONDS + 30):
    """Check that the hub ends the connection and sends no message before."""
    sock.settimeout(timeout)
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            received += data
    assert b'"op"' not in received


def test_another_key_is_refused(run):
    closed = threading.Event()
    stranger = Authenticator(Peer("node-1", run.nodes[1].incarnation), "hub", bytes(32))
    client = MessageClient(run.address, lambda *_: None, lambda _: closed.set(), authenticator=stranger)
    client.send(encoded(messages.RoundChanged(replace(run.round, state="succeeded"))))
    assert closed.wait(30)
    assert "does not hold the run's key" in client.connection.reason
    client.close()
    run.assert_unharmed()


class Relay:
    """A process between a node and a hub that may record, change or repeat what passes."""

    def __init__(self, target, change=lambda number, data: data):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.sent: list[bytes] = []
        self._target, self._change = target, change
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        near, _ = self.listener.accept()
        far = socket.create_connection(self._target, 10)
        threading.Thread(target=self._pass, args=(far, near, lambda _, data: data, []), daemon=True).start()
        with near, far:
            self._pass(near, far, self._change, self.sent)

    @staticmethod
    def _pass(source, target, change, kept):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept.append(data)
                target.sendall(change(len(kept), data))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.listener.close()


def through(run, relay, on_close=lambda _: None, on_message=lambda *_: None):
    key = bytes.fromhex(run.table.get(RUN_KEY).value["key"])
    authenticator = Authenticator(Peer("spare", "i-spare"), "hub", key)
    return MessageClient(relay.address, on_message, on_close, authenticator=authenticator)


def test_a_recorded_connection_cannot_be_repeated(run):
    relay = Relay(run.address)
    answered = threading.Event()
    client = through(run, relay, on_message=lambda *_: answered.set())
    client.send(encoded(messages.Watch(run.round.number)))
    assert answered.wait(30)
    client.close()
    relay.close()
    until(lambda: not run.leader.hub.view().waiting)
    with run.connect() as sock:
        for data in relay.sent:
            sock.sendall(data)
        assert_closed(sock)
    run.assert_unharmed()


def test_a_changed_message_ends_the_connection(run):
    def change(number, data):
        return data.replace(b'"round":1', b'"round":9') if b'"op"' in data else data

    relay = Relay(run.address, change)
    closed = threading.Event()
    client = through(run, relay, lambda _: closed.set())
    client.send(encoded(messages.Watch(run.round.number)))
    assert closed.wait(30)
    client.close()
    relay.close()
    run.assert_unharmed()


def test_slow_and_silent_clients_are_dropped(run):
    began = time.monotonic()
    with run.connect() as silent, run.connect() as slow:
        slow.sendall(b"\x00\x50")
        assert_closed(silent)
        assert_closed(slow)
    assert time.monotonic() - began >= HANDSHAKE_SECONDS / 2
    run.assert_unharmed()


def test_a_flood_of_idle_connections_leaves_room_for_nodes(run):
    """More than the hub allows at once; a node that comes meanwhile is served, and the round's heartbeats go on."""
    with contextlib.ExitStack() as stack:
        for _ in range(1500):
            stack.enter_context(run.connect())
        answered = threading.Event()
        spare = run.member("spare", "i-spare", lambda *_: answered.set())
        spare.send(encoded(messages.Watch(run.round.number)))
        assert answered.wait(HANDSHAKE_SECONDS)
        spare.close()
        until(lambda: not run.leader.hub.view().waiting)
        assert len(run.leader.hub._server._loop._unauthenticated._since) <= 512
        run.assert_unharmed()


def test_a_hub_without_free_descriptors_serves_its_members_and_later_the_others(run, caplog):
    """Another thread of this process may have closed a descriptor, which a newcomer then gets; so several come."""
    with contextlib.ExitStack() as stack:
        newcomers = [stack.enter_context(socket.socket()) for _ in range(5)]
        with no_free_descriptor() as taken:
            for newcomer in newcomers:
                taken.fill()
                newcomer.settimeout(60)
                newcomer.connect(run.address)
                newcomer.sendall(b"x" * 8)  # no handshake
            until(lambda: "could not accept a connection" in caplog.text)
            slowest = max(run.exchange() for _ in range(20))
            taken.free(20)
            for newcomer in newcomers:
                assert newcomer.recv(1) == b""  # accepted, and refused
            answered = threading.Event()
            spare = run.member("spare", "i-spare", lambda *_: answered.set())
            spare.send(encoded(messages.Watch(run.round.number)))
            assert answered.wait(HANDSHAKE_SECONDS)
            spare.close()
    until(lambda: not run.leader.hub.view().waiting)
    assert slowest < 1.0, "a message takes milliseconds, also on a busy machine"
    assert caplog.text.count("could not accept a connection") == 1
    run.assert_unharmed()


# --- processes that hold the key, but lie or are broken --------------------------------------------------------------


def test_a_closed_round_is_read_in_the_table_before_a_node_ends(run):
    member = run.member()
    for state in ("succeeded", "failed"):
        member.send(encoded(messages.RoundChanged(replace(run.round, state=state, message="mine", exit_code=3))))
    member.send(encoded(messages.RoundChanged(replace(run.round, number=10**9))))
    member.send(encoded(messages.RoundChanged(Round(10**9))))
    member.flush(10)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert not any(node.status().broken for node in run.nodes)
        time.sleep(0.02)
    member.close()
    run.assert_unharmed()


def closes(run, message, name="intruder", incarnation="i-intruder"):
    closed = threading.Event()
    client = run.member(name, incarnation, on_close=lambda _: closed.set())
    client.send(encoded(message))
    assert closed.wait(30)
    client.close()


def test_a_node_that_is_not_a_member_cannot_speak_as_one(run):
    closes(run, messages.MemberHello(run.round.number))
    closes(run, messages.MemberHello(run.round.number), "node-1", "an earlier incarnation")
    run.assert_unharmed()


def test_a_candidacy_in_the_name_of_another_node_is_refused(run):
    other = replace(run.round.members[1], round=run.round.number + 1)
    closes(run, messages.Watch(run.round.number + 1, is_open=True, candidacy=other))
    run.assert_unharmed()


def test_a_candidate_without_a_row_is_not_sealed(run):
    ghost = Member("a-ghost", "i-ghost", host="127.0.0.1", hub_port=1, store_port=1, round=run.round.number + 1)
    client = run.member("a-ghost", "i-ghost")
    client.send(encoded(messages.Watch(run.round.number + 1, is_open=True, candidacy=ghost)))
    until(lambda: any(row.node == "a-ghost" for row in run.leader.hub.candidates()))
    run.leader.round_end.write(Reopen("a test"))
    follower = next(node for node in run.nodes if node is not run.leader)
    until(lambda: follower.status().over)
    with ThreadPoolExecutor(2) as pool:
        rounds = [assignment.round for assignment in pool.map(Rendezvous.join, run.nodes)]
    assert [member.node for member in rounds[0].members] == [member.node for member in run.round.members]
    client.close()


def test_a_packed_bomb_of_a_member_ends_its_connection_alone(run):
    before = peak_mib()
    closed = threading.Event()
    client = run.member(on_close=lambda _: closed.set())
    client.send({"op": "round_changed", "round": packed_bomb()})
    assert closed.wait(30)
    client.close()
    assert peak_mib() - before < 64
    run.assert_unharmed()
