"""Random requests to the metadata service and to the table's proxy; ``python -m nox -s attack`` sends many."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from azureml_elastic.local.faults.metadata_service import MetadataService
from azureml_elastic.local.faults.table_proxy import TableProxy
from tests.support.descriptors import no_free_descriptor
from tests.support.http_attacks import BATCH, attack, exchange, random_request, statuses
from tests.support.waiting import until

EVENTS = "/vm-0/metadata/scheduledevents?api-version=2020-07-01"
ROW = "/devstoreaccount1/t(PartitionKey='p',RowKey='r')"


@pytest.fixture(autouse=True)
def unharmed(capfd):
    """No thread stays, and no handler fails."""
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)
    assert "Traceback" not in capfd.readouterr().err


def call(address, target, method="GET", body=None, **headers):
    with contextlib.closing(HTTPConnection(*address, timeout=30)) as connection:
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.fixture
def service():
    with MetadataService() as service:
        service.where = ("127.0.0.1", urlsplit(service.address("vm-0")).port)
        yield service


def test_requests_to_the_metadata_service(service):
    event = service.announce("Preempt", "vm-0")
    threads = threading.active_count()
    targets = (EVENTS, "/vm-0/metadata/instance/compute/name?api-version=2021-02-01&format=text", "/vm-0", "/")
    documents = ({"StartRequests": [{"EventId": event}]}, {"StartRequests": 5}, {"StartRequests": [[]]})

    @attack
    def send(choose):
        for _ in range(BATCH):
            received = exchange(service.where, random_request(choose, targets, documents))
            assert all(status < 500 or status in (501, 505) for status in statuses(received)), received

    until(lambda: threading.active_count() <= threads)
    status, body = call(service.where, EVENTS, Metadata="true")
    assert status == 200
    (found,) = json.loads(body)["Events"]
    assert (found["EventId"], found["EventStatus"]) == (event, "Scheduled")


def test_the_metadata_service_ends_while_connections_are_open(service):
    with socket.create_connection(service.where, 30) as idle:
        call(service.where, EVENTS, Metadata="true")
        service.__exit__()
        assert idle.recv(1) == b""
        until(lambda: not any(thread.name.endswith("process_request_thread)") for thread in threading.enumerate()))


class Table:
    """A table that answers every call with the length of its body."""

    def __init__(self):
        self.calls = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                with sock, sock.makefile("rb") as reader, contextlib.suppress(OSError):
                    line, length = reader.readline(), 0
                    while (header := reader.readline().strip()) != b"":
                        length = (
                            int(header.partition(b":")[2]) if header.lower().startswith(b"content-length") else length
                        )
                    body = reader.read(length)
                    self.calls.append((line.split()[0].decode(), line.split()[1].decode(), body))
                    text = str(len(body)).encode()
                    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.fixture
def table():
    made = Table()
    yield made
    made.close()


@pytest.fixture
def proxy(table):
    with TableProxy(f"http://127.0.0.1:{table.listener.getsockname()[1]}/devstoreaccount1") as proxy:
        proxy.where = ("127.0.0.1", urlsplit(proxy.endpoint).port)
        yield proxy


def test_requests_to_the_tables_proxy(proxy):
    threads = threading.active_count()

    @attack
    def send(choose):
        for _ in range(BATCH):
            received = exchange(proxy.where, random_request(choose, (ROW, "/devstoreaccount1/t()"), ({"RowKey": "r"},)))
            assert all(status < 500 for status in statuses(received)), received

    until(lambda: threading.active_count() <= threads)
    assert call(proxy.where, ROW, "PUT", b"{}") == (200, b"2")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Transfer-Encoding: chunked", 411),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 411),
        ("Content-Length: 5\r\nContent-Length: 6", 400),
        ("Content-Length: -1", 400),
        ("Content-Length: 99999999999", 413),
    ],
)
def test_a_call_whose_length_is_unknown_does_not_reach_the_table(proxy, table, headers, status):
    received = exchange(proxy.where, f"PUT {ROW} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + b"5\r\nabcde\r\n0\r\n\r\n")
    assert statuses(received) == {status}
    assert table.calls == []


def test_the_tables_proxy_accepts_calls_after_a_lack_of_descriptors(proxy):
    with socket.socket() as first, socket.socket() as second:
        with no_free_descriptor():
            for sock in (first, second):
                sock.settimeout(30)
                sock.connect(proxy.where)
            threading.Event().wait(0.2)
        for sock in (first, second):
            sock.sendall(f"PUT {ROW} HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
