"""Messages over real sockets: order, torn input, slow peers, and one ``on_close`` whatever happens."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ipc import MAX_LINE, LineReader, MessageClient, MessageServer, encode, listen

TIMEOUT_S = 20.0


class Recorder:
    """A server or client owner that records what it receives."""

    def __init__(self):
        self.messages = queue.Queue()
        self.closed = queue.Queue()
        self.ticks = queue.Queue()

    def on_message(self, connection, message):
        if message.get("op") == "fail":
            raise RuntimeError("asked to fail")
        if message.get("op") == "echo":
            connection.send({"re": message["id"], "value": message["value"]})
        else:
            self.messages.put((connection, message))

    def on_close(self, connection):
        self.closed.put(connection)

    def on_tick(self):
        self.ticks.put(time.monotonic())

    def next(self):
        return self.messages.get(timeout=TIMEOUT_S)

    def next_closed(self):
        return self.closed.get(timeout=TIMEOUT_S)


@pytest.fixture(params=["unix", "ipv4"])
def address(request, tmp_path):
    return str(tmp_path / "s") if request.param == "unix" else ("127.0.0.1", 0)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def server(address, recorder):
    with closing(MessageServer(listen(address), recorder.on_message, recorder.on_close)) as serving:
        yield serving


def raw(server):
    """A peer that speaks bytes."""
    family = socket.AF_UNIX if isinstance(server.address, str) else socket.AF_INET
    sock = socket.socket(family)
    sock.settimeout(TIMEOUT_S)
    sock.connect(server.address)
    return sock


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), max_size=8), st.data())
def test_reader_does_not_care_how_the_bytes_are_cut(messages, data):
    stream = b"".join(encode(message) for message in messages)
    reader, got, position = LineReader(), [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, len(stream) - position))
        got += reader.feed(stream[position : position + size])
        position += size
    assert got == messages


@pytest.mark.parametrize("line", [b"{", b"[]", b"1", b'"x"', b"\xff{}", b"{} {}"])
def test_reader_yields_what_came_before_the_torn_line(line):
    reader, got = LineReader(), []
    with pytest.raises(ValueError):  # noqa: PT011, PT012 - json's own texts
        for message in reader.feed(encode({"a": 1}) + line + b"\n"):
            got.append(message)  # noqa: PERF402
    assert got == [{"a": 1}]


def test_lines_are_bounded():
    with pytest.raises(ValueError, match=str(MAX_LINE)):
        encode({"x": "y" * MAX_LINE})
    with pytest.raises(ValueError, match="compliant"):
        encode({"x": float("nan")})
    fits = {"x": "y" * (MAX_LINE - 9)}
    assert len(encode(fits)) == MAX_LINE
    assert list(LineReader().feed(encode(fits))) == [fits]
    reader = LineReader()
    assert list(reader.feed(b"x" * (MAX_LINE - 1))) == []
    with pytest.raises(ValueError, match=str(MAX_LINE)):
        list(reader.feed(b"x"))


def test_thousands_of_messages_arrive_in_order(server, recorder):
    with closing(MessageClient(server.address, recorder.on_message)) as client:
        for number in range(5000):
            assert client.send({"n": number, "padding": "." * (number % 300)})
        assert [recorder.next()[1]["n"] for _ in range(5000)] == list(range(5000))


def test_requests_find_their_replies_from_many_threads(server, recorder):
    with closing(MessageClient(server.address, recorder.on_message)) as client:
        wrong = []

        def ask(base):
            for value in range(base, base + 200):
                reply = client.request({"op": "echo", "value": value}, TIMEOUT_S)
                if reply["value"] != value:
                    wrong.append((value, reply))

        threads = [threading.Thread(target=ask, args=(1000 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_request_without_a_reply_times_out_and_one_without_a_peer_fails(server, recorder):
    owner = Recorder()
    with closing(MessageClient(server.address, owner.on_message, owner.on_close)) as client:
        with pytest.raises(TimeoutError, match="'silence'"):
            client.request({"op": "silence"}, 0.01)
        connection, message = recorder.next()
        connection.send({"re": message["id"], "late": True})
        assert client.request({"op": "echo", "value": 1}, TIMEOUT_S)["value"] == 1
        waiting = threading.Thread(target=lambda: (recorder.next(), connection.close("enough")))
        waiting.start()
        with pytest.raises(ConnectionError, match="closed the connection"):
            client.request({"op": "silence"}, TIMEOUT_S)
        waiting.join()
        assert owner.next_closed() is client.connection
        assert not client.send({"op": "too late"})
    assert owner.closed.empty()
    assert recorder.next_closed().reason == "enough"


@pytest.mark.parametrize(
    "torn",
    [b"{\n", b"[1]\n", b"x" * (MAX_LINE + 1), b"[" * 100_000 + b"\n"],
    ids=["half a message", "no object", "too long", "too deep"],  # pytest and xdist send a test's name to and fro
)
def test_torn_input_ends_that_connection_only(server, recorder, torn):
    with closing(raw(server)) as bad, closing(MessageClient(server.address, recorder.on_message)) as good:
        bad.sendall(encode({"n": 1}))
        assert recorder.next()[1] == {"n": 1}
        with suppress(ConnectionError):  # cut off before all was sent or read
            bad.sendall(torn)
            assert bad.recv(1) == b""
        assert recorder.next_closed().reason
        assert good.request({"op": "echo", "value": 2}, TIMEOUT_S)["value"] == 2
    assert recorder.next_closed()
    assert recorder.closed.empty()


def test_a_failing_callback_ends_its_connection_and_is_logged(server, recorder, caplog):
    owner = Recorder()
    client = MessageClient(server.address, owner.on_message, owner.on_close)
    client.send({"op": "fail"})
    assert "asked to fail" in recorder.next_closed().reason
    assert "asked to fail" in caplog.text
    assert owner.next_closed().reason == "the peer closed the connection"
    client.close()
    with closing(MessageClient(server.address, recorder.on_message)) as other:
        assert other.request({"op": "echo", "value": 3}, TIMEOUT_S)["value"] == 3


def test_a_peer_that_does_not_read_is_cut_off_and_never_blocks_the_sender(server, recorder):
    with closing(raw(server)) as lazy:
        lazy.sendall(encode({"op": "here"}))
        connection, _ = recorder.next()
        began = time.monotonic()
        sent = 0
        while connection.send({"padding": "." * 100_000}):
            sent += 1
            assert sent < 10_000
        assert time.monotonic() - began < TIMEOUT_S
        assert recorder.next_closed() is connection
        assert "unread" in connection.reason


def test_what_waits_is_sent_when_the_slow_peer_reads_at_last(server, recorder):
    with closing(raw(server)) as slow:
        slow.sendall(encode({"op": "here"}))
        connection, _ = recorder.next()
        for number in range(60):
            assert connection.send({"n": number, "padding": "." * 100_000})
        assert not connection.flush(0.01)
        lines = slow.makefile("rb")
        assert [json.loads(next(lines))["n"] for _ in range(60)] == list(range(60))
        assert connection.flush(TIMEOUT_S)
        lines.close()


def test_broadcast_reaches_all(server, recorder):
    owners = [Recorder() for _ in range(5)]
    clients = [MessageClient(server.address, owner.on_message) for owner in owners]
    for client in clients:
        client.request({"op": "echo", "value": 0}, TIMEOUT_S)
    server.broadcast({"news": 1})
    assert [owner.next()[1] for owner in owners] == [{"news": 1}] * 5
    for client in clients:
        client.close()


def test_last_received_and_state_belong_to_the_connection(server, recorder):
    with closing(MessageClient(server.address, recorder.on_message)) as client:
        client.send({"n": 1})
        connection, _ = recorder.next()
        connection.state["rank"] = 3
        first = connection.last_received
        client.send({"n": 2})
        again, _ = recorder.next()
        assert again is connection
        assert again.state == {"rank": 3}
        assert again.last_received >= first


def test_ticks_go_on_and_survive_a_failing_one(address, recorder):
    def tick():
        recorder.on_tick()
        raise RuntimeError("tick")

    with closing(MessageServer(listen(address), recorder.on_message, None, tick, tick=0.01)):
        for _ in range(3):
            recorder.ticks.get(timeout=TIMEOUT_S)


@pytest.mark.parametrize("who", ["client", "server", "both"])
def test_close_races_call_on_close_exactly_once(address, who):
    for _ in range(20):
        at_server, at_client = Recorder(), Recorder()
        server = MessageServer(listen(address), at_server.on_message, at_server.on_close)
        client = MessageClient(server.address, at_client.on_message, at_client.on_close)
        client.request({"op": "echo", "value": 1}, TIMEOUT_S)
        ends = {"client": [client.close], "server": [server.close], "both": [client.close, server.close]}[who]
        threads = [threading.Thread(target=end) for end in ends for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if who == "server":
            at_client.next_closed()
        server.close()
        client.close()
        at_server.next_closed()
        assert at_server.closed.empty()
        assert at_client.closed.qsize() <= (who == "both")  # the server's end may come before its own


def test_nobody_listens(tmp_path):
    with pytest.raises(OSError, match="nobody"):
        MessageClient(str(tmp_path / "nobody"), lambda *_: None)


def test_a_path_too_long_for_a_socket_is_named(tmp_path):
    with pytest.raises(OSError, match="Cannot listen"):
        listen(str(tmp_path / ("x" * 120)))


def test_threads_end(address):
    before = set(threading.enumerate())
    server = MessageServer(listen(address), lambda *_: None)
    clients = [MessageClient(server.address, lambda *_: None) for _ in range(5)]
    server.close()
    for client in clients:
        client.close()
    assert set(threading.enumerate()) <= before
