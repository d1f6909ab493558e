"""From the endpoint in the plan to an open table, and from the workspace to its storage account."""

from pathlib import Path

import pytest
from azure.core.credentials import AccessToken

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import TableForbidden, TableNotFound, UsageError
from azureml_elastic.node.azure.workspace import ARM_URL, workspace_endpoint
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.sqlite import SqliteTable

JOB = {
    "AZUREML_ARM_SUBSCRIPTION": "sub-1",
    "AZUREML_ARM_RESOURCEGROUP": "my group",
    "AZUREML_ARM_WORKSPACE_NAME": "ws",
}
# No account can have a name with a dash, so that the one of its host has no address anywhere.
ACCOUNT = "/subscriptions/sub-1/resourceGroups/other/providers/Microsoft.Storage/storageAccounts/ws-storage"


class Reader:
    """A credential with one token."""

    def get_token(self, *scopes, **_options):
        return AccessToken(f"token for {scopes[0]}", 2**40)


@pytest.mark.parametrize("form", ["{}/table.sqlite", "{}/table", "sqlite:///{}/table.sqlite", "SQLite:///{}/table"])
def test_the_forms_of_an_sqlite_file(tmp_path, form):
    table = open_table(TableRendezvous(endpoint=form.format(tmp_path)), "run", NodeEnvironment.read({}))
    assert isinstance(table, SqliteTable)
    table.insert("key", {})
    table.close()
    assert [path.stem for path in tmp_path.iterdir()] == ["table"]


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for endpoint in ("one.db", "sqlite:///two.db", "runs/three"):
        open_table(TableRendezvous(endpoint=endpoint), "run", NodeEnvironment.read({})).close()
    assert {str(path) for path in Path().rglob("*")} == {"one.db", "two.db", "runs", "runs/three"}


def test_the_emulator_with_its_published_key_and_with_a_connection_string(azurite):
    here = TableRendezvous(endpoint=azurite.endpoint, table="opening")
    with_key = open_table(here, "run", NodeEnvironment.read({}))
    with_key.insert("key", {"n": 1})
    environ = {"AZURE_STORAGE_CONNECTION_STRING": azurite.connection_string}
    only_the_string = TableRendezvous(table="opening")
    for rendezvous in (
        here,
        here.model_copy(update={"credential": "connection_string"}),
        only_the_string,
        only_the_string.model_copy(update={"credential": "connection_string"}),
    ):
        table = open_table(rendezvous, "run", NodeEnvironment.read(environ))
        assert table.get("key").value == {"n": 1}
        table.close()
    with_key.close()


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        " ",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/path",
        "postgres://host/db",
        "https://",
        "http://",
        "http://storage.example/account",
        "localhost:29500",
        "10.0.0.4:29400",
        "account.table.core.windows.net",
    ],
)
def test_other_forms_are_refused_with_the_accepted_ones(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        open_table(TableRendezvous(endpoint=endpoint), "run", NodeEnvironment.read({}))
    for part in (repr(endpoint), "https://<account>.table.core.windows.net", "devstoreaccount1", "sqlite:///"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_tokens_do_not_travel_over_plain_http(azurite):
    with pytest.raises(UsageError, match="plain HTTP"):
        open_table(
            TableRendezvous(endpoint=azurite.endpoint, credential="managed_identity"), "run", NodeEnvironment.read({})
        )


def test_no_endpoint_outside_azure_ml():
    with pytest.raises(UsageError, match=r"names no endpoint.*AZUREML_ARM_SUBSCRIPTION.*sqlite:///"):
        open_table(TableRendezvous(), "run", NodeEnvironment.read({}))


def test_no_endpoint_within_azure_ml_asks_the_node_for_a_token(serve):
    refusing = serve(lambda _call: (400, {"error": "no identity"}))
    environ = JOB | {"OBO_ENDPOINT": refusing.url}
    with pytest.raises(TableForbidden, match="no identity"):
        open_table(TableRendezvous(credential="on_behalf_of"), "run", NodeEnvironment.read(environ))
    assert refusing.calls[0].query == {"resource": "https://management.azure.com"}


def test_the_workspaces_storage_account(serve):
    arm = serve(lambda _call: (200, {"properties": {"storageAccount": ACCOUNT}}))
    assert (
        workspace_endpoint(NodeEnvironment.read(JOB), Reader(), arm.url) == "https://ws-storage.table.core.windows.net"
    )
    call = arm.calls[0]
    assert call.path == (
        "/subscriptions/sub-1/resourceGroups/my%20group/providers/Microsoft.MachineLearningServices/workspaces/ws"
    )
    assert call.headers["Authorization"] == "Bearer token for https://management.azure.com/.default"
    assert set(call.query) == {"api-version"}


def test_a_workspace_that_cannot_be_read(serve):
    for status in (401, 403):
        arm = serve(lambda _call, status=status: (status, {"error": {"code": "AuthorizationFailed"}}))
        with pytest.raises(TableForbidden, match=rf"'ws'.*HTTP {status}.*'Reader'"):
            workspace_endpoint(NodeEnvironment.read(JOB), Reader(), arm.url)


@pytest.mark.parametrize(
    "answer", [(404, {"error": {}}), (200, {}), (200, {"properties": {"storageAccount": None}}), (200, b"<html>")]
)
def test_a_workspace_without_a_storage_account(serve, answer):
    arm = serve(lambda _call: answer)
    with pytest.raises(TableNotFound, match=r"'ws'.*names no storage account"):
        workspace_endpoint(NodeEnvironment.read(JOB), Reader(), arm.url)


def test_a_busy_resource_manager_is_waited_for(serve):
    answers = [(503, {}), (429, {}), (200, {"properties": {"storageAccount": ACCOUNT}}), (403, {})]
    arm = serve(lambda _call: answers.pop(0))
    assert (
        workspace_endpoint(NodeEnvironment.read(JOB), Reader(), arm.url) == "https://ws-storage.table.core.windows.net"
    )


def test_an_account_whose_usual_name_has_no_address_is_asked_for_its_own(serve):
    zone = "https://ws-storage.z13.table.storage.azure.net/"

    def answer(call):
        if "Microsoft.Storage" not in call.path:
            return 200, {"properties": {"storageAccount": ACCOUNT}}
        assert call.path == ACCOUNT
        return 200, {"properties": {"primaryEndpoints": {"table": zone}}}

    arm = serve(answer)
    assert workspace_endpoint(NodeEnvironment.read(JOB), Reader(), arm.url) == zone.rstrip("/")


@pytest.mark.parametrize(
    ("environ", "scope", "suffix"),
    [
        ({}, "https://management.azure.com", "core.windows.net"),
        ({"AZUREML_CURRENT_CLOUD": "azurechinacloud"}, "https://management.chinacloudapi.cn", "core.chinacloudapi.cn"),
        (
            {"AZUREML_SERVICE_ENDPOINT": "https://chinaeast2.api.ml.azure.cn"},
            "https://management.chinacloudapi.cn",
            "core.chinacloudapi.cn",
        ),
        (
            {"AZUREML_SERVICE_ENDPOINT": "https://usgovvirginia.api.ml.azure.us"},
            "https://management.usgovcloudapi.net",
            "core.usgovcloudapi.net",
        ),
        (
            {
                "AZUREML_SERVICE_ENDPOINT": "https://usgovvirginia.api.ml.azure.us",
                "AZUREML_CURRENT_CLOUD": "AzureCloud",
            },
            "https://management.azure.com",
            "core.windows.net",
        ),
        ({"AZUREML_SERVICE_ENDPOINT": "https://eastus.api.azureml.ms"}, ARM_URL, "core.windows.net"),
    ],
)
def test_the_clouds_of_china_and_the_us_government(serve, environ, scope, suffix):
    arm = serve(
        lambda call: (200, {"properties": {"storageAccount": ACCOUNT}}) if "Learning" in call.path else (403, {})
    )
    assert (
        workspace_endpoint(NodeEnvironment.read(JOB | environ), Reader(), arm.url)
        == f"https://ws-storage.table.{suffix}"
    )
    assert {call.headers["Authorization"] for call in arm.calls} == {f"Bearer token for {scope}/.default"}


def test_an_unknown_cloud_is_refused():
    with pytest.raises(UsageError, match=r"'AzureMoonCloud'.*AzureCloud, AzureChinaCloud, AzureUSGovernment"):
        workspace_endpoint(NodeEnvironment.read(JOB | {"AZUREML_CURRENT_CLOUD": "AzureMoonCloud"}), Reader())


def test_what_is_missing_in_the_environment_is_named():
    environ = {"AZUREML_ARM_SUBSCRIPTION": "s", "AZUREML_ARM_WORKSPACE_NAME": ""}
    with pytest.raises(UsageError, match="without AZUREML_ARM_RESOURCEGROUP, AZUREML_ARM_WORKSPACE_NAME in"):
        workspace_endpoint(NodeEnvironment.read(environ), Reader())
