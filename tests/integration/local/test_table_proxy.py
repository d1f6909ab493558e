"""Effects of each kind of table fault on the wire."""

import contextlib
import json
import socket
import threading
import time
from http.client import HTTPConnection, HTTPException, RemoteDisconnected
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.local.faults.model import LIES, TROUBLES, Disturbance, draw
from azureml_elastic.local.faults.table_proxy import TableProxy
from tests.support.waiting import until

OF_CALLS = [kind for kind in TROUBLES if kind not in ("outage", "any", *LIES)]


class Service:
    """A fake table that records its calls and responds with a document."""

    def __init__(self):
        service = self
        self.calls = []
        self.times = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                service.times.append(time.monotonic())
                service.calls.append((self.command, self.path, body, self.headers.get("Authorization")))
                data = b"" if self.command == "PUT" else b'{"said": "' + b"x" * 200 + b'"}'
                self.send_response(204 if self.command == "PUT" else 200)
                self.send_header("x-ms-version", "1")
                self.send_header("Content-Type", "application/json")
                if data:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = answer  # noqa: N815 - the base class's names

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/account"

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def service():
    made = Service()
    yield made
    made.close()


@pytest.fixture
def proxy(service, tmp_path):
    with TableProxy(service.url, seed=1, log=tmp_path / "calls.jsonl") as made:
        yield made


@contextlib.contextmanager
def client(proxy, timeout=30.0):
    connection = HTTPConnection("127.0.0.1", int(proxy.endpoint.split(":")[2].split("/")[0]), timeout=timeout)
    with contextlib.closing(connection):
        yield connection


def call(connection, method="GET", path="/account/t(PartitionKey='p',RowKey='it''s')?a=b", body=None):
    connection.request(method, path, body, {"Authorization": "signature"})
    response = connection.getresponse()
    return response.status, response.read(), response.headers


def exchanges(proxy, count):
    """Return the calls, which are recorded at their end: a moment after the client has its answer."""
    until(lambda: len(proxy.exchanges) >= count)
    assert len(proxy.exchanges) == count
    return proxy.exchanges


def test_a_call_without_a_fault_passes_unchanged_and_is_recorded(proxy, service, tmp_path):
    with client(proxy) as connection:
        status, data, headers = call(connection)
        assert (status, len(data), headers["x-ms-version"]) == (200, 212, "1")
        assert call(connection, "PUT", body=b"{}")[:2] == (204, b"")
        assert call(connection, "POST", "/account/t", b'{"RowKey": "new"}')[0] == 200
    path = "/account/t(PartitionKey='p',RowKey='it''s')"
    assert service.calls[0] == ("GET", f"{path}?a=b", b"", "signature")
    assert service.calls[1][:3] == ("PUT", f"{path}?a=b", b"{}")
    assert [exchange.row for exchange in exchanges(proxy, 3)] == ["it's", "it's", "new"]
    assert [exchange.written for exchange in proxy.exchanges] == [False, True, True]
    called = [(exchange.method, exchange.path, exchange.trouble) for exchange in proxy.exchanges]
    assert called == [("GET", path, None), ("PUT", path, None), ("POST", "/account/t", None)]
    lines = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2, 3]
    assert "signature" not in (tmp_path / "calls.jsonl").read_text()


@pytest.mark.parametrize("arrives", [True, False])
def test_a_reset_call_arrives_or_not(proxy, service, arrives):
    proxy.set(Disturbance("reset", arrives=arrives))
    with client(proxy) as connection, pytest.raises(ConnectionError):
        call(connection, "PUT", body=b"{}")
    (exchange,) = exchanges(proxy, 1)
    assert (exchange.trouble, exchange.arrived, exchange.answered) == ("reset", arrives, False)
    assert exchange.written is arrives
    assert len(service.calls) == arrives


@pytest.mark.parametrize("arrives", [True, False])
def test_a_call_without_a_response_lasts_until_the_client_closes(proxy, service, arrives):
    proxy.set(Disturbance("timeout", arrives=arrives))
    with client(proxy, timeout=0.3) as connection, pytest.raises(TimeoutError):
        call(connection)
    exchanges(proxy, 1)
    assert len(service.calls) == arrives


@pytest.mark.parametrize("retry_after", [0, 3])
def test_a_throttled_call_gets_the_response_of_azure_and_never_arrives(proxy, service, retry_after):
    proxy.set(Disturbance("throttle", retry_after_s=(retry_after,)))
    with client(proxy) as connection:
        for _ in range(2):  # the connection stays
            status, data, headers = call(connection)
            assert (status, headers["Retry-After"]) == (503, str(retry_after) if retry_after else None)
            assert json.loads(data)["odata.error"]["code"] == headers["x-ms-error-code"] == "ServerBusy"
    assert service.calls == []


def test_a_slow_response_or_call_is_late(proxy, service):
    proxy.set(Disturbance("slow", arrives=True, delay_s=(0.5, 0.5)))
    with client(proxy) as connection:
        began = time.monotonic()
        assert call(connection)[0] == 200
        assert time.monotonic() - began >= 0.5
        proxy.set(Disturbance("slow", arrives=False, delay_s=(0.5, 0.5)))
        began = time.monotonic()
        connection.request("PUT", "/account/t", b"{}")
    until(lambda: len(service.calls) == 2)  # the client has hung up
    assert service.times[1] - began >= 0.5
    assert exchanges(proxy, 2)[1].written


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_half_a_response_and_then_a_reset(proxy, service, method):
    proxy.set(Disturbance("half"))
    with client(proxy) as connection, pytest.raises((ConnectionError, HTTPException)) as caught:
        call(connection, method)
    assert not isinstance(caught.value, RemoteDisconnected)
    assert len(service.calls) == 1


def test_garbage_is_a_page_of_html(proxy, service):
    proxy.set(Disturbance("garbage", arrives=False, statuses=(404,)))
    with client(proxy) as connection:
        status, data, headers = call(connection)
        assert (status, headers["Content-Type"]) == (404, "text/html")
        assert data.startswith(b"<html>")
        assert service.calls == []
        proxy.set(Disturbance("garbage", arrives=True))
        assert call(connection)[1].startswith(b"<html>")
        assert len(service.calls) == 1


def test_an_outage_refuses_connections_and_keeps_the_port(proxy, service):
    with client(proxy) as idle:
        assert call(idle)[0] == 200
        outage = proxy.add(Disturbance("outage"))
        with pytest.raises(ConnectionError):
            call(idle)
        for _ in range(3):
            with client(proxy) as other, pytest.raises(ConnectionRefusedError):
                call(other)
        port = int(proxy.endpoint.split(":")[2].split("/")[0])
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))
        proxy.remove(outage)
        with client(proxy) as other:
            assert call(other)[0] == 200
    assert len(service.calls) == 2


def test_an_outage_drops_the_response_of_a_call_in_progress(proxy, service):
    def begin():
        until(lambda: service.calls)
        proxy.add(Disturbance("outage"))

    proxy.set(Disturbance("slow", arrives=True, delay_s=(3, 3), times=1))
    thread = threading.Thread(target=begin)
    thread.start()
    with client(proxy) as connection, pytest.raises(ConnectionError):
        call(connection, "PUT", body=b"{}")
    thread.join()
    (exchange,) = exchanges(proxy, 1)
    assert (exchange.written, exchange.answered) == (True, False)
    assert len(service.calls) == 1


def test_two_outages_may_overlap(proxy):
    first, second = proxy.add(Disturbance("outage")), proxy.add(Disturbance("outage"))
    proxy.remove(first)
    with client(proxy) as connection, pytest.raises(ConnectionRefusedError):
        call(connection)
    proxy.remove(second)
    proxy.remove(second)  # it is not in force any more
    with client(proxy) as connection:
        assert call(connection)[0] == 200


def test_only_the_selected_calls_are_affected(proxy):
    proxy.set(
        Disturbance("throttle", methods=("PUT",), times=1),
        Disturbance("garbage", about="it''s", statuses=(502,), methods=("GET",)),
        Disturbance("throttle", about='"RowKey": "new"'),
    )
    with client(proxy) as connection:
        seen = [
            call(connection, method, path, body)[0]
            for method, path, body in [
                ("PUT", "/account/a", b"{}"),
                ("PUT", "/account/a", b"{}"),
                ("GET", "/account/t(RowKey='it''s')", None),
                ("GET", "/account/t(RowKey='other')", None),
                ("POST", "/account/t", b'{"RowKey": "new"}'),
                ("POST", "/account/t", b'{"RowKey": "old"}'),
            ]
        ]
    assert seen == [503, 204, 502, 200, 503, 200]
    exchanges(proxy, 6)
    calls = [exchange for exchange in proxy.exchanges if (exchange.method, exchange.path) == ("PUT", "/account/a")]
    assert len(calls) == 2
    assert sum(exchange.trouble is not None for exchange in calls) == 1


def test_the_same_calls_have_the_same_faults(service):
    def fates(seed):
        with TableProxy(service.url, seed=seed) as proxy:
            proxy.set(Disturbance("any", share=0.5, delay_s=(0.0, 0.01)))
            for index in range(40):
                with client(proxy, timeout=0.05) as connection, contextlib.suppress(OSError, HTTPException):
                    call(connection, ("GET", "PUT")[index % 2], "/account/a")
                exchanges(proxy, index + 1)
            return [(exchange.trouble, exchange.arrived) for exchange in proxy.exchanges]

    first = fates(7)
    assert first == fates(7)
    assert first != fates(8)
    assert {None} < {trouble for trouble, _ in first}


def test_every_kind_is_drawn_by_any_and_half_arrives():
    fates = [draw([Disturbance("any", share=0.5)], str(seed)) for seed in range(400)]
    hit = [fate for fate in fates if fate is not None]
    assert 100 < len(hit) < 300
    assert {fate.kind for fate in hit} == set(OF_CALLS)
    assert all(fate.arrives for fate in hit if fate.kind == "half")
    assert not any(fate.arrives for fate in hit if fate.kind == "throttle")
    for kind in ("timeout", "reset", "slow", "garbage"):
        assert {fate.arrives for fate in hit if fate.kind == kind} == {True, False}
    assert all(2 <= fate.delay_s <= 20 for fate in hit if fate.kind == "slow")


def test_many_clients_at_once(proxy, service):
    def work(results):
        with client(proxy) as connection:
            results.extend(call(connection)[0] for _ in range(10))

    results = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * 320
    assert len(service.calls) == 320
    assert sorted(exchange.number for exchange in exchanges(proxy, 320)) == list(range(1, 321))


def test_the_proxy_closes_at_once_during_calls(service):
    before = set(threading.enumerate())
    with TableProxy(service.url) as proxy, contextlib.ExitStack() as stack:
        proxy.set(Disturbance("timeout"))
        for _ in range(3):
            stack.enter_context(client(proxy)).request("GET", "/account/a")
        stack.enter_context(client(proxy)).connect()
        time.sleep(0.2)
        began = time.monotonic()
        proxy.__exit__(None, None, None)
        assert time.monotonic() - began < 10  # it would wait five seconds for each of them
        until(lambda: set(threading.enumerate()) <= before)
    with client(proxy) as connection, pytest.raises(ConnectionRefusedError):
        connection.connect()


def test_clients_of_an_ended_table_are_reset(proxy, service):
    service.close()
    with client(proxy) as connection, pytest.raises(ConnectionError):
        call(connection)
    (exchange,) = exchanges(proxy, 1)
    assert (exchange.status, exchange.answered) == (None, False)


@pytest.mark.parametrize("target", ["https://a.table.core.windows.net", "/tmp/table.sqlite", ""])
def test_only_plain_http_is_supported(target):
    with pytest.raises(UsageError, match="azurite"):
        TableProxy(target)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "boom"},
        {"kind": "slow", "share": 0.0},
        {"kind": "slow", "share": 1.5},
        {"kind": "outage", "share": 0.5},
    ],
)
def test_a_disturbance_out_of_range_is_refused(wrong):
    with pytest.raises(UsageError):
        Disturbance(**wrong)
