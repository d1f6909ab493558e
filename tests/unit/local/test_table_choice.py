"""The table of a local cluster."""

import os

import pytest

from azureml_elastic.config import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.summary import Paths
from azureml_elastic.local.azurite import (
    TableChoice,
    check_table,
    connection_endpoint,
    open_table_choice,
)
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.node.table import open_table

SECRET = "AccountName=acc;AccountKey=c2VjcmV0;TableEndpoint=http://127.0.0.1:9/acc"


@pytest.mark.parametrize(
    ("connection", "endpoint"),
    [
        (SECRET, "http://127.0.0.1:9/acc"),
        ("UseDevelopmentStorage=true", "http://127.0.0.1:10002/devstoreaccount1"),
        ("DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=a==", "https://acc.table.core.windows.net"),
        ("AccountName=a;AccountKey=k;EndpointSuffix=core.chinacloudapi.cn", "https://a.table.core.chinacloudapi.cn"),
    ],
)
def test_the_endpoint_of_a_connection_string(connection, endpoint):
    assert connection_endpoint(connection) == endpoint


def test_a_connection_string_without_a_table_is_refused_without_its_secret():
    with pytest.raises(UsageError, match="names no table endpoint") as caught:
        connection_endpoint("AccountKey=c2VjcmV0;BlobEndpoint=http://x")
    assert "c2VjcmV0" not in str(caught.value)


@pytest.mark.parametrize("table", ["", "mysql", "ftp://x", "account"])
def test_an_unknown_table_is_refused(table):
    with pytest.raises(UsageError, match="not recognised"):
        check_table(table)


def test_the_choices_of_a_table(tmp_path, monkeypatch):
    paths = Paths.of(tmp_path)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    with open_table_choice("sqlite", paths) as table:
        assert table == TableChoice(str(tmp_path / "table.sqlite"))
    with open_table_choice("https://acc.table.core.windows.net", paths) as table:
        assert table == TableChoice("https://acc.table.core.windows.net")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", SECRET)
    with open_table_choice("azurite", paths) as table:
        assert table == TableChoice("http://127.0.0.1:9/acc", "connection_string")


@pytest.mark.parametrize("table", ["sqlite", "https://acc.table.core.windows.net"])
def test_faults_of_a_table_without_a_proxy_are_refused(tmp_path, table):
    schedule = parse_schedule("table=outage@step:3/5s")
    with pytest.raises(UsageError, match=r"table=outage@step:3/5s.*--table azurite"):
        check_table(table, schedule)
    with pytest.raises(UsageError, match="azurite"):
        LocalCluster(table=table, chaos=schedule, run_dir=tmp_path / "run").run(["x.py"])
    assert not (tmp_path / "run").exists()
    check_table(table, parse_schedule("kill=any@step:3"))


def test_table_faults_over_tls_are_refused(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=acc;AccountKey=c2VjcmV0")
    with pytest.raises(UsageError, match="over TLS") as caught:
        check_table("azurite", parse_schedule("table=slow@5s"))
    assert "c2VjcmV0" not in str(caught.value)


@pytest.mark.parametrize("development", [True, False])
def test_table_faults_put_a_proxy_between_nodes_and_table(tmp_path, azurite, monkeypatch, development):
    connection = "UseDevelopmentStorage=true" if development else azurite.connection_string
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    with open_table_choice("azurite", Paths.of(tmp_path), parse_schedule("table=slow@5s", seed=3)) as choice:
        assert choice.endpoint == choice.proxy.endpoint != azurite.endpoint
        assert connection_endpoint(choice.environment["AZURE_STORAGE_CONNECTION_STRING"]) == choice.endpoint
        if not development:
            where = TableRendezvous(endpoint=choice.endpoint, credential=choice.credential)
            table = open_table(where, "run", NodeEnvironment.read({**os.environ, **choice.environment}))
            table.insert("row", {})
            table.close()
    if not development:
        assert '"row": "row"' in (tmp_path / "table.jsonl").read_text()
    with open_table_choice("azurite", Paths.of(tmp_path), parse_schedule("kill=any@5s")) as choice:
        assert choice.proxy is None
