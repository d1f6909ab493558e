"""The Azure backend on a network that fails, with the real emulator behind it."""

import logging
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from azureml_elastic.errors import (
    RowChanged,
    RowExists,
    TableForbidden,
    TableNotFound,
    TableUnavailable,
    UsageError,
)
from azureml_elastic.local.faults.model import Disturbance
from azureml_elastic.local.faults.table_proxy import TableProxy
from azureml_elastic.node.azure.credentials import TableCredential
from azureml_elastic.node.table.azure import AzureTable
from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string


@pytest.fixture
def open_azure():
    tables = []

    def opened(connection_string, table=None, timeout=10.0, endpoint=None):
        login = TableCredential("connection string of the test", connection_string=connection_string)
        name = table or f"t{uuid.uuid4().hex}"
        tables.append(AzureTable(endpoint, name, "run", login, timeout=timedelta(seconds=timeout)))
        return tables[-1]

    yield opened
    for table in tables:
        table.close()


@pytest.fixture
def pair(faulty, azurite, open_azure):
    """The faults, a table that suffers them, and the same table without."""
    faults, connection_string = faulty
    name = f"t{uuid.uuid4().hex}"
    return faults, open_azure(connection_string, name), open_azure(azurite.connection_string, name)


def busy(status):
    return lambda _call: (status, {"odata.error": {"code": "ServerBusy", "message": {"value": "slow down"}}})


def test_an_insert_whose_answer_was_lost_is_ours(pair):
    faults, table, other = pair
    faults.spoil("POST", "lose", "lose")
    etag = table.insert("key", {"n": 1})
    row = other.get("key")
    assert (row.value, row.etag) == ({"n": 1}, etag)
    table.replace("key", {"n": 2}, etag)


def test_a_replacement_whose_answer_was_lost_is_ours(pair):
    faults, table, other = pair
    first = table.insert("key", {"n": 1})
    faults.spoil("PUT", "lose")
    second = table.replace("key", {"n": 2}, first)
    assert second != first
    row = other.get("key")
    assert (row.value, row.etag) == ({"n": 2}, second)


def test_a_write_that_something_below_us_repeats_is_ours(pair):
    faults, table, _ = pair

    def twice(call):
        faults.forward(call)
        return faults.forward(call)

    faults.spoil("POST", twice)
    etag = table.insert("key", {"n": 1})
    faults.spoil("PUT", twice)
    etag = table.replace("key", {"n": 2}, etag)
    assert table.get("key").etag == etag


def test_what_others_wrote_is_not_taken_for_ours(pair):
    faults, table, other = pair
    etag = other.insert("key", {"by": "other"})
    with pytest.raises(RowExists):
        table.insert("key", {"by": "other"})
    newer = other.replace("key", {"by": "other"}, etag)
    with pytest.raises(RowChanged):
        table.replace("key", {"by": "other"}, etag)
    assert table.get("key").etag == newer
    faults.spoil("POST", busy(429))  # refused before it was carried out: no doubt
    with pytest.raises(RowExists):
        table.insert("key", {"by": "us"})


def test_a_lost_answer_and_then_another_writer_are_reported_as_a_doubt(pair):
    faults, table, other = pair

    def then(change):
        def way(call):
            faults.forward(call)
            change(other.get("key"))

        return way

    faults.spoil("POST", then(lambda row: other.replace("key", {"by": "other"}, row.etag)))
    with pytest.raises(TableUnavailable, match=r"'key'.*may or may not"):
        table.insert("key", {"by": "us"})
    row = table.get("key")
    assert row.value == {"by": "other"}
    faults.spoil("PUT", then(lambda row: other.replace("key", {"by": "other"}, row.etag)))
    with pytest.raises(TableUnavailable, match=r"'key'.*may or may not"):
        table.replace("key", {"by": "us"}, row.etag)
    faults.spoil("PUT", then(lambda row: other.delete("key", row.etag)))
    with pytest.raises(TableUnavailable, match=r"'key'.*may or may not"):
        table.replace("key", {"by": "us"}, other.get("key").etag)
    etag = table.insert("key", {"by": "us"})
    faults.spoil("DELETE", "lose")
    with pytest.raises(TableUnavailable, match=r"'key'.*may or may not"):
        table.delete("key", etag)
    assert other.get("key") is None


def test_a_deletion_whose_answer_was_lost_is_done(pair):
    faults, table, other = pair
    table.insert("key", {})
    faults.spoil("DELETE", "lose")
    table.delete("key")
    assert other.get("key") is None


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_service_is_waited_for(pair, status):
    faults, table, _ = pair
    for method in ("POST", "GET", "PUT", "GET", "DELETE"):
        faults.spoil(method, busy(status), busy(status))
    etag = table.insert("key", {"n": 1})
    assert table.get("key").etag == etag
    etag = table.replace("key", {"n": 2}, etag)
    assert [row.etag for row in table.query("k")] == [etag]
    table.delete("key")


def test_a_lost_page_is_asked_for_again(pair):
    faults, table, other = pair
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: other.insert(f"{n:04}", {}), range(1001)))
    rows = table.query("")
    first = next(rows)
    faults.spoil("GET", "lose", busy(503))
    assert {first.key, *(row.key for row in rows)} == {f"{n:04}" for n in range(1001)}


def test_retries_end_at_the_time_limit(faulty, open_azure, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.azure.http._SHORTEST_ATTEMPT_S", 60.0)  # each attempt gets its answer
    faults, connection_string = faulty
    table = open_azure(connection_string)
    table._timeout = timedelta(seconds=0.5)
    faults.spoil("GET", *[busy(503)] * 1000)
    start = time.monotonic()
    with pytest.raises(TableUnavailable, match=r"HTTP 503.*may be repeated") as caught:
        table.get("key")
    assert time.monotonic() - start < 8
    assert caught.value.__cause__ is not None


def test_a_server_that_accepts_and_never_answers_is_noticed(open_azure, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.table.azure._READ_TIMEOUT_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{EMULATOR_ACCOUNT}"
        start = time.monotonic()
        with pytest.raises(TableUnavailable, match="no readable answer"):
            open_azure(emulator_connection_string(url), timeout=0.5)
        assert time.monotonic() - start < 8


def test_an_account_that_cannot_be_reached(serve, azurite, faulty, open_azure):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # which refuses connections, as it does not listen, and holds the port
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/{EMULATOR_ACCOUNT}"
        with pytest.raises(TableNotFound, match="cannot be reached"):
            open_azure(emulator_connection_string(url), timeout=0.3)
    unknown = "AccountName=nobody;AccountKey=AAAA;TableEndpoint=https://nobody.table.azure.invalid"
    with pytest.raises(TableNotFound, match=r"nobody\.table\.azure\.invalid.*cannot be reached"):
        open_azure(unknown, timeout=0.3)


def test_a_table_that_is_being_deleted_is_waited_for(faulty, open_azure):
    faults, connection_string = faulty
    deleting = {"odata.error": {"code": "TableBeingDeleted", "message": {"value": "try again"}}}
    faults.spoil("POST", lambda _: (409, deleting), lambda _: (409, deleting))
    assert open_azure(connection_string).get("key") is None


def test_a_table_that_another_node_makes_first(faulty, azurite, open_azure):
    faults, connection_string = faulty
    name = f"t{uuid.uuid4().hex}"

    def meanwhile(call):
        open_azure(azurite.connection_string, name)
        return faults.forward(call)

    faults.spoil("POST", meanwhile)
    assert open_azure(connection_string, name).get("key") is None


def test_an_account_that_refuses_us(azurite, open_azure):
    wrong = emulator_connection_string(azurite.endpoint).replace("Eby8vdM0", "Eby8vdM1")
    with pytest.raises(TableForbidden, match="Storage Table Data Contributor") as caught:
        open_azure(wrong)
    for part in (azurite.endpoint, "connection string of the test"):
        assert part in str(caught.value)
    assert "Eby8" not in str(caught.value)


def test_connection_strings_that_cannot_be_used(azurite, open_azure):
    for text in ("nonsense", "AccountName=a", "AccountKey=secret;x"):
        with pytest.raises(UsageError, match=r"connection string of the test cannot be read") as caught:
            open_azure(text)
        assert "secret" not in str(caught.value)
    with pytest.raises(UsageError, match=r"https://other\.table.*is for 'http://127"):
        open_azure(azurite.connection_string, endpoint="https://other.table.core.windows.net")
    open_azure(azurite.connection_string, endpoint=azurite.endpoint + "/")


def test_the_service_gone_later_is_unavailable_and_not_missing(azurite, open_azure):
    with TableProxy(azurite.endpoint) as proxy:
        table = open_azure(emulator_connection_string(proxy.endpoint))
        proxy.set(Disturbance("outage"))  # holds the port: a free one may soon be that of another service
        table._timeout = timedelta(seconds=0.3)
        with pytest.raises(TableUnavailable, match="cannot be reached"):
            table.get("key")


def test_many_threads_keep_their_connections(azurite, open_azure, caplog):
    table = open_azure(azurite.connection_string)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(128) as pool:
        list(pool.map(lambda n: table.insert(f"member.{n}", {}), range(512)))
    assert len(list(table.query("member."))) == 512
    assert not caplog.records
