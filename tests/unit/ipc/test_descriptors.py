"""A server whose process has no free file descriptor: it serves the connections it has, and accepts others later."""

from __future__ import annotations

import resource
import socket
import time

import pytest

from azureml_elastic.ipc import MessageClient, MessageServer, encode, listen
from azureml_elastic.ipc.event_loop import limits
from tests.support.descriptors import no_free_descriptor
from tests.support.waiting import until

REQUESTS = 200


class Owner:
    """Echoes messages and records the ticks of its server."""

    def __init__(self):
        self.ticks = []

    def on_message(self, connection, message):
        connection.send({"re": message.get("id", 0)})

    def on_tick(self):
        self.ticks.append(time.monotonic())


@pytest.fixture
def server():
    owner = Owner()
    serving = MessageServer(listen(("127.0.0.1", 0)), owner.on_message, on_tick=owner.on_tick, tick=0.02)
    serving.owner = owner
    yield serving
    serving.close()


def newcomer(server, sock):
    """Connect a socket that exists already, which needs a descriptor of the server alone."""
    sock.settimeout(20)
    sock.connect(server.address)
    sock.sendall(encode({"id": 1}))


def test_connections_are_served_and_new_ones_wait(server, caplog):
    client = MessageClient(server.address, lambda *_: None)
    client.request({"op": "echo"}, 10)
    with socket.socket() as first, socket.socket() as second:
        with no_free_descriptor() as taken:
            newcomer(server, first)
            newcomer(server, second)
            until(lambda: caplog.records)
            began, process, ticks = time.monotonic(), time.process_time(), len(server.owner.ticks)
            for _ in range(REQUESTS):
                client.request({"op": "echo"}, 10)
            seconds = time.monotonic() - began
            assert seconds < 3.0, "at 50 ms a request it takes 10 s"
            time.sleep(0.5)
            ticks = len(server.owner.ticks) - ticks
            assert ticks > (time.monotonic() - began) / 0.02 / 4
            busy = time.process_time() - process
            assert busy < 0.9 * (time.monotonic() - began), "the server's thread waits, rather than trying all the time"
            assert len(server.connections) == 1
            taken.free(1)
            assert first.recv(100) == encode({"re": 1})
            # A connection that ends frees its descriptor for one that waits.
            first.shutdown(socket.SHUT_RDWR)
            assert second.recv(100) == encode({"re": 1})
        client.close()
    (record,) = caplog.records
    assert "Too many open files" in record.getMessage()
    assert "ulimit -n" in record.getMessage()


@pytest.mark.parametrize(
    ("files", "total", "of_an_address"),
    [(resource.RLIM_INFINITY, 1024, 512), (1 << 20, 1024, 512), (1024, 512, 256), (256, 128, 64), (3, 1, 1)],
)
def test_clients_that_are_not_authenticated_take_at_most_half_of_the_descriptors(files, total, of_an_address):
    assert limits(files) == (total, of_an_address)
