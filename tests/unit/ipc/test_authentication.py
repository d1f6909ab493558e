"""The handshake and the tags of messages, without sockets."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ipc.authentication import AuthenticationError, Authenticator, Peer

KEY = bytes(range(32))
CLIENT, SERVER = Peer("node-ü", "c1"), Peer("node-s", "s1")


def ends(client_key=KEY, server_key=KEY, purposes=("hub", "hub"), to=SERVER):
    client = Authenticator(CLIENT, purposes[0], client_key).open(to)
    return client, Authenticator(SERVER, purposes[1], server_key).accept()


def complete(client, server):
    server.feed(client.feed(server.feed(client.opening)))
    return client.session, server.session


def test_both_ends_know_each_other():
    client, server = complete(*ends())
    assert (client.peer, server.peer) == (SERVER, CLIENT)
    for number, (sender, receiver) in itertools.product(range(3), ((client, server), (server, client))):
        line = f'{{"number":{number}}}\n'.encode()
        assert receiver.open(sender.seal(line).removesuffix(b"\n")) == line.removesuffix(b"\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_key": bytes(32)}, "the server does not hold"),
        ({"server_key": bytes(32)}, "the server does not hold"),
        ({"server_key": None}, "does not know the run's key yet"),
        ({"client_key": None}, "does not know the run's key yet"),
        ({"purposes": ("shards", "hub")}, "another protocol"),
    ],
)
def test_ends_that_do_not_agree_have_no_session(changes, message):
    client, server = ends(**changes)
    with pytest.raises(AuthenticationError, match=message):
        complete(client, server)
    assert client.session is server.session is None


def test_a_client_that_does_not_hold_the_key_is_refused_even_if_it_ignores_the_servers_proof():
    client, server = ends(client_key=bytes(32))
    answer = server.feed(client.opening)
    stolen = answer[-34:]  # the server's own proof, sent back to it
    with pytest.raises(AuthenticationError, match="the client does not hold"):
        server.feed(len(stolen).to_bytes(2, "big") + stolen)


def test_another_incarnation_is_refused_by_both():
    client, server = ends(to=Peer("node-s", "before"))
    answer = server.feed(client.opening)
    assert "means another process" in server.refusal
    assert client.feed(answer) == b""
    assert "another process, node-s's" in client.refusal
    assert client.session is None


def test_a_recorded_handshake_is_worth_nothing():
    client, server = ends()
    proof = client.feed(server.feed(client.opening))
    again = Authenticator(SERVER, "hub", KEY).accept()
    again.feed(client.opening)
    with pytest.raises(AuthenticationError, match="the client does not hold"):
        again.feed(proof)


@given(cut=st.lists(st.integers(1, 40), max_size=12))
def test_frames_may_arrive_in_pieces(cut):
    def pieces(data):
        for size in cut:
            yield data[:size]
            data = data[size:]
        yield data

    client, server = ends()
    answer = b"".join(server.feed(piece) for piece in pieces(client.opening))
    proof = b"".join(client.feed(piece) for piece in pieces(answer))
    for piece in pieces(proof + b"rest"):
        if server.session is None:
            server.feed(piece)
        else:
            server._received += piece
    assert server.session is not None
    assert server.take_rest() == b"rest"


@pytest.mark.parametrize("change", ["repeat", "skip", "reorder", "flip", "reflect", "shorten"])
def test_a_message_that_is_not_the_next_one_is_refused(change):
    client, server = complete(*ends())
    first, second = (client.seal(line).removesuffix(b"\n") for line in (b'{"op":"a"}\n', b'{"op":"b"}\n'))
    receiver = server
    lines = {
        "repeat": [first, first],
        "skip": [second],
        "reorder": [second, first],
        "flip": [first[:-2] + b"x" + first[-1:]],
        "reflect": [first],
        "shorten": [first[:20]],
    }[change]
    if change == "reflect":
        receiver = client
    *before, last = lines
    if change == "repeat":
        receiver.open(*before)
        before = []
    with pytest.raises(AuthenticationError, match="not authentic"):
        receiver.open((before or [last])[0])


@pytest.mark.parametrize("end", [0, 1], ids=["client", "server"])
@given(data=st.binary(max_size=4096))
def test_either_end_survives_any_bytes(end, data):
    handshake = ends()[end]
    with contextlib.suppress(AuthenticationError):
        handshake.feed(data)
    assert handshake.session is None


@given(position=st.integers(0, 500), bit=st.integers(0, 7), frame=st.integers(0, 2))
def test_a_changed_bit_ends_the_handshake(position, bit, frame):
    client, server = ends()

    def changed(data, number):
        if number != frame:
            return data
        data = bytearray(data)
        data[position % len(data)] ^= 1 << bit
        return bytes(data)

    with contextlib.suppress(AuthenticationError):
        answer = changed(server.feed(changed(client.opening, 0)), 1)
        proof = client.feed(answer)
        if proof:
            server.feed(changed(proof, 2))
    assert server.session is None


def test_names_that_are_too_long_are_refused_before_anything_is_sent():
    with pytest.raises(AuthenticationError, match="shorten names"):
        Authenticator(Peer("n" * 3000, "i"), "hub", KEY).open(SERVER)
