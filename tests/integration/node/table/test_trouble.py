"""The Azure backend behind a network that does everything wrong: nothing is lost, nothing is written twice."""

import contextlib
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import RowChanged, RowExists, TableNotFound, TableUnavailable
from azureml_elastic.local.faults.model import Disturbance
from azureml_elastic.local.faults.table_proxy import TableProxy
from azureml_elastic.node.azure.credentials import TableCredential
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.azure import AzureTable
from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string
from tests.support.waiting import until

PAGES = [200, 302, 400, 403, 404, 409, 412, 502]


@pytest.fixture
def proxy(azurite):
    with TableProxy(azurite.endpoint, seed=3) as made:
        yield made


@pytest.fixture
def open_at():
    tables = []

    def opened(endpoint, name=None, timeout=10.0):
        login = TableCredential("the test's key", connection_string=emulator_connection_string(endpoint))
        name = name or f"t{uuid.uuid4().hex}"
        tables.append(AzureTable(None, name, "run", login, timeout=timedelta(seconds=timeout)))
        return tables[-1]

    yield opened
    for table in tables:
        table.close()


@pytest.fixture
def pair(proxy, azurite, open_at):
    """A table behind the proxy, and the same one without it."""
    name = f"t{uuid.uuid4().hex}"
    return open_at(proxy.endpoint, name), open_at(azurite.endpoint, name)


def writes(proxy, row):
    """How many writes of the row the table has carried out."""
    return sum(exchange.written and exchange.row == row for exchange in proxy.exchanges)


@contextlib.contextmanager
def given_up_soon(table):
    """A call that fails for want of an answer."""
    timeout, table._timeout = table._timeout, timedelta(seconds=0.6)
    with pytest.raises(TableUnavailable):
        yield
    table._timeout = timeout


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("kind", ["throttle", "reset", "half", "slow", "garbage", "timeout"])
def test_every_call_survives_every_trouble_and_writes_once(proxy, pair, kind, arrives):
    table, other = pair
    trouble = Disturbance(kind, arrives=arrives, delay_s=(0.2, 0.2), times=1)
    proxy.set(trouble)
    etag = table.insert("row", {"n": 1})
    assert other.get("row").etag == etag
    proxy.set(trouble)
    etag = table.replace("row", {"n": 2}, etag)
    assert (other.get("row").etag, other.get("row").value) == (etag, {"n": 2})
    if kind == "timeout":  # each of them takes some seconds
        assert writes(proxy, "row") == 2
        return
    proxy.set(trouble)
    assert table.get("row").etag == etag
    proxy.set(trouble)
    assert [row.key for row in table.query("r")] == ["row"]
    assert writes(proxy, "row") == 2
    proxy.set(trouble)
    table.delete("row")
    assert other.get("row") is None


@pytest.mark.parametrize("status", PAGES)
def test_a_page_of_something_in_between_is_never_the_tables_word(proxy, pair, status):
    table, other = pair
    etag = other.insert("row", {"n": 1})
    page = Disturbance("garbage", statuses=(status,), arrives=False, times=1)
    proxy.set(page)
    assert table.get("row").etag == etag
    proxy.set(page)
    assert len(list(table.query(""))) == 1
    proxy.set(page)
    etag = table.replace("row", {"n": 2}, etag)
    proxy.set(page)
    table.insert("new", {})
    proxy.set(page)
    table.delete("row", etag)
    assert other.get("row") is None


def test_such_pages_without_end_say_what_they_are(proxy, pair, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.azure.http._SHORTEST_ATTEMPT_S", 60.0)  # each attempt gets its answer
    table, _ = pair
    table._timeout = timedelta(seconds=0.5)
    proxy.set(Disturbance("garbage", statuses=(404,)))
    with pytest.raises(TableUnavailable, match=r"text/html.*HTTP 404.*a gateway, a proxy or a firewall"):
        table.get("row")


def test_a_call_that_arrives_after_its_repetition_changes_nothing(proxy, pair, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.table.azure._READ_TIMEOUT_S", 1.0)
    table, other = pair
    late = Disturbance("slow", arrives=False, delay_s=(8.0, 8.0), times=1)  # after the client's time-out
    proxy.set(late)
    etag = table.insert("row", {"n": 1})
    etag = table.replace("row", {"n": 2}, etag)
    proxy.set(late)
    etag = table.replace("row", {"n": 3}, etag)
    etag = table.replace("row", {"n": 4}, etag)

    def late_calls():
        return [exchange for exchange in proxy.exchanges if exchange.trouble == "slow"]

    until(lambda: len(late_calls()) == 2)
    calls = late_calls()
    assert [(call.arrived, call.status) for call in calls] == [(True, 409), (True, 412)]
    assert (other.get("row").value, other.get("row").etag) == ({"n": 4}, etag)


@pytest.mark.parametrize("kind", ["reset", "garbage"])
def test_a_write_given_up_goes_on_when_the_same_call_is_made_again(proxy, azurite, open_at, kind):
    name = f"t{uuid.uuid4().hex}"
    table, other = open_at(proxy.endpoint, name), open_at(azurite.endpoint, name)
    lost = Disturbance(kind, arrives=True, statuses=(502,))
    proxy.set(lost)
    with given_up_soon(table):
        table.insert("row", {"n": 1})
    until(lambda: writes(proxy, "row") == 1)
    assert other.get("row").value == {"n": 1}  # it was written, and nobody knows
    proxy.clear()
    etag = table.insert("row", {"n": 1})
    assert (writes(proxy, "row"), other.get("row").etag) == (1, etag)
    proxy.set(lost)
    for _ in range(2):
        with given_up_soon(table):
            table.replace("row", {"n": 2}, etag)
    until(lambda: writes(proxy, "row") == 2)
    proxy.clear()
    newer = table.replace("row", {"n": 2}, etag)
    assert (writes(proxy, "row"), other.get("row").etag) == (2, newer)
    with pytest.raises(RowExists):
        table.insert("row", {"n": 1})  # settled: made once more, it is a call of its own
    with pytest.raises(RowChanged):
        table.replace("row", {"n": 2}, etag)


def test_a_write_given_up_and_overtaken_is_in_doubt_once(proxy, azurite, open_at):
    name = f"t{uuid.uuid4().hex}"
    table, other = open_at(proxy.endpoint, name), open_at(azurite.endpoint, name)
    etag = table.insert("row", {"n": 1})
    proxy.set(Disturbance("reset", arrives=True))
    with given_up_soon(table):
        table.replace("row", {"n": 2}, etag)
    until(lambda: writes(proxy, "row") == 2)
    proxy.clear()
    other.replace("row", {"n": 3}, other.get("row").etag)
    with pytest.raises(TableUnavailable, match="may or may not"):
        table.replace("row", {"n": 2}, etag)
    with pytest.raises(RowChanged):
        table.replace("row", {"n": 2}, etag)
    assert other.get("row").value == {"n": 3}


def test_writers_who_repeat_what_failed_append_each_entry_once(proxy, azurite, open_at):
    name = f"t{uuid.uuid4().hex}"
    writers = [open_at(proxy.endpoint, name, timeout=5.0) for _ in range(4)]
    check = open_at(azurite.endpoint, name)
    writers[0].insert("list", {"entries": []})
    proxy.set(
        Disturbance("timeout", share=0.02),
        Disturbance("any", share=0.2, delay_s=(0.05, 0.5), statuses=(502, 404, 200)),
    )

    def append(table, writer):
        for number in range(8):
            entry = f"{writer}.{number}"
            while True:
                try:
                    row = table.get("list")
                    if entry in row.value["entries"]:
                        break
                    table.replace("list", {"entries": [*row.value["entries"], entry]}, row.etag)
                    break
                except (RowChanged, TableUnavailable):
                    continue

    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(append, writers, range(len(writers))))
    proxy.clear()
    entries = check.get("list").value["entries"]
    assert sorted(entries) == sorted(f"{writer}.{number}" for writer in range(4) for number in range(8))
    assert any(exchange.trouble for exchange in proxy.exchanges)


def test_retry_after_is_respected_within_the_time_limit(proxy, pair, monkeypatch):
    table, _ = pair
    table.insert("row", {})
    proxy.set(Disturbance("throttle", retry_after_s=(1,), times=2))
    began = time.monotonic()
    table.get("row")
    assert time.monotonic() - began >= 2.0
    monkeypatch.setattr("azureml_elastic.node.azure.http._LONGEST_RETRY_AFTER_S", 60.0)
    proxy.set(Disturbance("throttle", retry_after_s=(3600,)))
    began = time.monotonic()
    with pytest.raises(TableUnavailable, match="HTTP 503"):
        table.get("row")
    assert time.monotonic() - began < 30


def test_opening_an_unavailable_table_waits_and_logs(proxy, caplog):
    proxy.set(Disturbance("outage"))
    back = threading.Timer(12.0, proxy.clear)  # longer than the time limit of one call
    back.start()
    began = time.monotonic()
    table = open_table(
        TableRendezvous(endpoint=proxy.endpoint, table=f"t{uuid.uuid4().hex}"), "run", NodeEnvironment.read({})
    )
    table.insert("row", {})
    table.close()
    assert time.monotonic() - began > 11
    assert "Trying for" in caplog.text


def test_opening_a_table_that_stays_unavailable_fails():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}/{EMULATOR_ACCOUNT}"
    with pytest.raises(TableNotFound, match="cannot be reached"):
        open_table(TableRendezvous(endpoint=endpoint), "run", NodeEnvironment.read({}), timeout=timedelta(0))


def test_a_host_without_an_address_is_not_waited_for():
    environ = {
        "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=AAAA;TableEndpoint=http://no.such.invalid/a"
    }
    began = time.monotonic()
    with pytest.raises(TableNotFound, match=r"no\.such\.invalid.*cannot be reached"):
        open_table(TableRendezvous(endpoint="http://no.such.invalid/a"), "run", NodeEnvironment.read(environ))
    assert time.monotonic() - began < 30
