"""Findings and advice of the doctor, against HTTPS servers on this machine that simulate Azure."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest

from azureml_elastic.config import ElasticResources, Plan, TableRendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.diagnostics import doctor as command
from azureml_elastic.node.diagnostics.checks.network import check_host, check_peer
from azureml_elastic.node.diagnostics.checks.workspace import claims_of, why_refused
from azureml_elastic.node.diagnostics.doctor import examine
from azureml_elastic.node.diagnostics.findings import DiagnosticReport, Finding
from azureml_elastic.testing.api.gateway import Gateway, answer_node
from azureml_elastic.testing.messages import Answer, document, refusal
from azureml_elastic.testing.storage import StorageAccount
from tests.support.listening import silent_port

HERE = "127.0.0.1"
OBJECT = "11111111-2222-3333-4444-555555555555"
WORKSPACE = "/subscriptions/sub-1/resourceGroups/my group/providers/Microsoft.MachineLearningServices/workspaces/ws"
ACCOUNT = "/subscriptions/sub-1/resourceGroups/other/providers/Microsoft.Storage/storageAccounts/wsstore"
KEY = base64.b64encode(b"a planted key of the account" * 2).decode()
SECRET_TOKEN = "planted-signature-of-the-token"


def token(resource: str) -> str:
    claims = {"aud": resource, "oid": OBJECT, "tid": "tenant-1", "upn": "ada@example.org"}
    pieces = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, claims)]
    return ".".join([*pieces, SECRET_TOKEN])


def service_error(status: int, code: str, text: str) -> Answer:
    body = {"odata.error": {"code": code, "message": {"lang": "en-US", "value": f"{text}\nRequestId:1"}}}
    headers = (("Content-Type", "application/json"), ("x-ms-request-id", "1"))
    named = (("x-ms-error-code", code),) if code else ()
    return Answer(status, headers + named, json.dumps(body if code else {}).encode())


MISMATCH = service_error(
    403,
    "AuthorizationPermissionMismatch",
    "This request is not authorized to perform this operation using this permission.",
)


class Azure:
    """Answers as the resource manager, the storage account and the token service of a node."""

    def __init__(self) -> None:
        self.workspace = document({"properties": {"storageAccount": ACCOUNT}})
        self.account = document(
            {"properties": {"primaryEndpoints": {"table": "https://wsstore.table.core.windows.net/"}}}
        )
        self.table = lambda _: MISMATCH
        self.token = lambda resource: document({"access_token": token(resource), "expires_in": "3600"})
        self.asked: list[str] = []

    def arm(self, request) -> Answer:
        self.asked.append(f"https://{request.host}{request.path}")
        assert request.headers["authorization"] == f"Bearer {token(f'https://{request.host}')}"
        return self.workspace if request.path == WORKSPACE else self.account

    def serve(self, request) -> Answer:
        return self.table(request)

    def own(self, request) -> Answer:
        asked = answer_node(request)
        return self.token(json.loads(asked.body)["resource"]) if asked.status == 200 else asked


@pytest.fixture
def azure(tmp_path, monkeypatch):
    """The fake services, to which this process routes HTTPS through its environment, as in a job of Azure ML."""
    made = Azure()
    hosts = {
        "management.azure.com": made.arm,
        "management.chinacloudapi.cn": made.arm,
        "wsstore.table.core.windows.net": made.serve,
        "wsstore.table.core.chinacloudapi.cn": made.serve,
        "wsstore.z07.table.storage.azure.net": made.serve,
    }
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "NO_PROXY", "no_proxy", "OBO_ENDPOINT", variables.PLAN):
        monkeypatch.delenv(name, raising=False)
    with Gateway(hosts, made.own) as gateway:
        bundle = str(gateway.write_bundle(tmp_path / "trusted.pem"))
        made.environ = {
            "HTTPS_PROXY": gateway.address,
            "https_proxy": gateway.address,
            "REQUESTS_CA_BUNDLE": bundle,
            "SSL_CERT_FILE": bundle,
            "MSI_ENDPOINT": f"{gateway.address}/token",
            "AZUREML_ARM_SUBSCRIPTION": "sub-1",
            "AZUREML_ARM_RESOURCEGROUP": "my group",
            "AZUREML_ARM_WORKSPACE_NAME": "ws",
            variables.LOCAL_ADDRESS: HERE,
        }
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        yield made


def found(azure: Azure, rendezvous: TableRendezvous | None = None, **more) -> dict[str, Finding]:
    report = DiagnosticReport(
        tuple(examine(rendezvous or TableRendezvous(), NodeEnvironment.read({**azure.environ, **more})))
    )
    output = report.text()
    assert SECRET_TOKEN not in output
    assert KEY not in output
    return by_name(report.findings)


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


GRANT = f'az role assignment create --assignee {OBJECT} --role "Storage Table Data Contributor" --scope {ACCOUNT}'


def test_a_missing_role_on_the_account_is_named_with_the_command_that_grants_it(azure):
    findings = found(azure)
    assert [name for name, finding in findings.items() if finding.status == "fail"] == ["table: open or make it"]
    refused = findings["table: open or make it"]
    assert "AuthorizationPermissionMismatch" in refused.value
    assert GRANT in refused.advice
    assert "the network is not the reason" in refused.advice
    assert findings["identity"].value == (
        f"the node's managed identity (system-assigned), ada@example.org, object id {OBJECT}, tenant tenant-1"
    )
    assert findings["workspace"].value.startswith("ws of resource group my group, subscription sub-1")
    assert "management.azure.com by the proxy 127.0.0.1:" in findings["resource manager"].value
    for step in ("name", "proxy", "TLS"):
        assert f"{step} " in findings["table service"].value
    assert DiagnosticReport(tuple(findings.values())).failed


def own_zone() -> Answer:
    properties = {
        "primaryEndpoints": {"table": "https://wsstore.z07.table.storage.azure.net/"},
        "networkAcls": {"defaultAction": "Deny"},
        "allowSharedKeyAccess": False,
    }
    return document({"properties": properties})


FIREWALL = service_error(403, "AuthorizationFailure", "This request is not authorized to perform this operation.")
BLOCKS = document({"kind": "BlockBlobStorage", "sku": {"name": "Premium_LRS"}, "properties": {}})
FORBIDDEN, ABSENT = (refusal(*each, "no") for each in ((403, "AuthorizationFailed"), (404, "ResourceGroupNotFound")))
READER = f"az role assignment create --assignee {OBJECT} --role \"Reader\" --scope '{WORKSPACE}'"
ROWS = "table: open or make it"
ANSWERS = {
    "firewall, not role": (
        {"table": lambda _: FIREWALL},
        {
            ROWS: (
                "fail",
                "The account's firewall does not admit this machine",
                "az storage account network-rule add --account-name wsstore",
                "AuthorizationPermissionMismatch",
                f"az storage account show --ids {ACCOUNT}",
            )
        },
    ),
    "no reason": ({"table": lambda _: service_error(403, "", "")}, {ROWS: ("fail", GRANT, "network-rule add")}),
    "workspace not read": (
        {"workspace": FORBIDDEN},
        {"workspace": ("fail", "AuthorizationFailed (HTTP 403)", READER), ROWS: None, "ports": ("ok",)},
    ),
    "other tenant": (
        {"workspace": refusal(401, "InvalidAuthenticationTokenTenant", "no")},
        {"workspace": ("fail", "InvalidAuthenticationTokenTenant", "az login --tenant"), ROWS: None},
    ),
    "no group": ({"workspace": ABSENT}, {"workspace": ("fail", "ResourceGroupNotFound (HTTP 404)", "Check the names")}),
    "no account": (
        {"workspace": document({"properties": {}})},
        {"workspace": ("fail", "names no storage account", "endpoint="), ROWS: None},
    ),
    "account known by its name": (
        {"account": FORBIDDEN},
        {
            "storage account": ("ok", "its address follows from its name"),
            ROWS: ("fail", "https://wsstore.table.core.windows.net refuses"),
        },
    ),
    "zone of its own": (
        {"account": own_zone()},
        {
            "storage account": ("ok", "; only from the networks that its firewall admits, no keys, only identities"),
            "table service": ("ok", "wsstore.z07.table.storage.azure.net"),
        },
    ),
    "no tables": (
        {"account": BLOCKS},
        {
            "storage account": ("fail", "(BlockBlobStorage, Premium_LRS) has no table service"),
            "table service": None,
        },
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_azure_answers_is_explained(azure, case):
    answers, expected = ANSWERS[case]
    vars(azure).update(answers)
    findings = found(azure)
    for name, (status, *parts) in ((name, each) for name, each in expected.items() if each is not None):
        assert findings[name].status == status, findings[name]
        assert [part for part in parts if part not in str(findings[name])] == [], findings[name]
    assert not findings.keys() & {name for name, each in expected.items() if each is None}


def test_an_account_that_takes_no_keys(azure):
    azure.table = lambda _: service_error(
        403, "KeyBasedAuthenticationNotPermitted", "Key based authentication is not permitted on this storage account."
    )
    endpoint = "https://wsstore.table.core.windows.net"
    string = f"DefaultEndpointsProtocol=https;AccountName=wsstore;AccountKey={KEY};TableEndpoint={endpoint};"
    rendezvous = TableRendezvous(endpoint=endpoint, credential="connection_string")
    findings = found(azure, rendezvous, AZURE_STORAGE_CONNECTION_STRING=string)
    assert findings["identity"].value == "connection string in AZURE_STORAGE_CONNECTION_STRING"
    advice = findings["table: open or make it"].advice
    assert "allowSharedKeyAccess is false" in advice
    assert "--scope $(az storage account show --name wsstore --query id -o tsv)" in advice


def test_the_cloud_of_china(azure):
    azure.account = refusal(403, "AuthorizationFailed", "no")
    findings = found(azure, AZUREML_SERVICE_ENDPOINT="https://chinaeast2.api.ml.azure.cn")
    assert azure.asked == [f"https://management.chinacloudapi.cn{path}" for path in (WORKSPACE, ACCOUNT)]
    assert "wsstore.table.core.chinacloudapi.cn" in findings["table service"].value


def test_no_identity(azure):
    azure.token = lambda _: refusal(400, "invalid_request", "Identity not found")
    findings = found(azure, TableRendezvous(credential="managed_identity"))
    assert findings["identity"].status == "fail"
    assert "az login" in findings["identity"].advice
    assert "workspace" not in findings


def test_outside_of_a_job_the_workspace_is_missing(azure):
    findings = by_name(examine(TableRendezvous(), NodeEnvironment.read({}), no_workspace="No workspace is named."))
    assert findings["workspace"].value == "No workspace is named."
    assert "--workspace-name" in findings["workspace"].advice


@pytest.fixture(scope="module")
def storage():
    with StorageAccount() as account:
        yield account


def as_account(storage: StorageAccount, change=lambda request: request):
    """Answer with a real Azurite, under the account's own name."""
    (forward,) = (answer for host, answer in storage.hosts.items() if ".table." in host)

    def answer(request) -> Answer:
        return forward(change(replace(request, host=storage.table_host)))

    return answer


def test_a_table_that_works(azure, storage):
    azure.table = as_account(storage)
    findings = found(azure)
    report = DiagnosticReport(tuple(findings.values()))
    assert not report.failed, report.text()
    steps = [
        "open or make it",
        "insert a row",
        "read it",
        "replace this version",
        "an old version is refused",
        "delete it",
    ]
    assert [name for name in findings if name.startswith("table: ")] == [f"table: {step}" for step in steps]


def test_a_table_that_takes_old_versions_is_noticed(azure, storage):
    def careless(request):
        headers = {name: "*" if name == "if-match" else value for name, value in request.headers.items()}
        return replace(request, headers=headers)

    azure.table = as_account(storage, careless)
    finding = found(azure)["table: an old version is refused"]
    assert finding.status == "fail"
    assert "its version was outdated" in finding.value


def test_a_role_that_reads_only_is_refused_when_it_writes(azure, storage):
    works = as_account(storage)

    def read_only(request):
        return MISMATCH if request.method == "POST" and not request.path.startswith("/Tables") else works(request)

    azure.table = read_only
    findings = found(azure)
    assert findings["table: open or make it"].status == "ok"
    assert GRANT in findings["table: insert a row"].advice


# --- the way to a host -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_proxy(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_an_untrusted_certificate(azure, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    finding = check_host("resource manager", "https://management.azure.com", NodeEnvironment.read({}))
    assert finding.status == "fail"
    assert "its certificate is not trusted" in finding.value
    assert "REQUESTS_CA_BUNDLE and SSL_CERT_FILE" in finding.advice


def test_a_host_that_the_proxy_does_not_reach(azure):
    finding = check_host("table service", "https://no-such-host.invalid", NodeEnvironment.read(azure.environ))
    assert finding.status == "fail"
    assert "Tunnel connection failed" in finding.value
    assert "Have the proxy let no-such-host.invalid:443 through" in finding.advice


def test_a_name_without_an_address(no_proxy):
    finding = check_host("table service", "https://no-such-account.table.core.invalid", NodeEnvironment.read({}))
    assert "its name has no address" in finding.value
    assert "privatelink.table.core.windows.net" in finding.advice


def test_ports_that_refuse_and_accept(no_proxy):
    with socket.create_server((HERE, 0)) as listening:
        port = listening.getsockname()[1]
        assert check_host("table service", f"http://{HERE}:{port}", NodeEnvironment.read({})).value.startswith(
            f"{HERE} at {HERE} (private): "
        )
        assert check_peer(HERE, port).status == "ok"
    finding = check_host("table service", f"http://{HERE}:{port}", NodeEnvironment.read({}))
    assert "refused" in finding.value
    assert f"Open outbound TCP {port}" in finding.advice
    finding = check_peer(HERE, port)
    assert (finding.name, finding.value) == (f"peer {HERE}:{port}", "the machine answers and refuses")


def test_a_peer_behind_a_firewall():
    with silent_port() as port:
        finding = check_peer(HERE, port)
    assert finding.value == "connection timed out after 5 s"
    assert "one virtual network" in finding.advice


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path):
    return TableRendezvous(endpoint=str(tmp_path / "t.sqlite"))


def examined(rendezvous, **changes):
    return by_name(examine(rendezvous.model_copy(update=changes), NodeEnvironment.read({})))


def test_address_and_ports(local):
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        low = probe.getsockname()[1] - 1
    findings = examined(local, advertise="lo", port_range=(low, low + 9))
    assert findings["address"].value == "127.0.0.1 of lo, for nodes of this machine only"
    ports, _, among = findings["ports"].value.partition(" (")
    assert among == f"{low}-{low + 9})"
    assert all(low <= int(port) <= low + 9 for port in ports.split(", "))
    assert findings["torch"].status == "ok"
    assert "shared memory" in findings
    assert all(finding.status != "fail" for name, finding in findings.items() if name != "shared memory")


def test_an_interface_that_is_not_there_and_ports_that_are_taken(local):
    assert "There are: " in examined(local, advertise="wlan9")["address"].value
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server((HERE, 0)))
        low = first.getsockname()[1]
        for port in range(low + 1, low + 3):
            with contextlib.suppress(OSError):  # taken by another process, which is sufficient
                stack.enter_context(socket.create_server((HERE, port)))
        finding = examined(local, port_range=(low, low + 2))["ports"]
    assert finding.status == "fail"
    assert "All 3 ports" in finding.value


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_examines_the_plan_of_its_environment(local, monkeypatch, capsys):
    plan = Plan(
        resources=ElasticResources(max_instance_count=1),
        rendezvous=local.model_copy(update={"table": "fromtheplan"}),
        name="run",
    )
    monkeypatch.setenv(variables.PLAN, plan.to_json())
    assert command.main([]) == 0
    assert "fromtheplan" in capsys.readouterr().out
    assert command.main(["--table", "another", "--peer", f"{HERE}:1"]) == 1
    output = capsys.readouterr().out
    assert "another" in output
    assert "peer 127.0.0.1:1" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port-range", "29400"], "'29400' is no range of ports"),
        (["--port-range", "29400-29401"], "has 2 ports; a node needs 3"),
        (["--peer", "10.0.0.5"], "'10.0.0.5' is no host and port"),
        (["--table", "no-dashes"], "String should match"),
    ],
)
def test_wrong_options(arguments, said, monkeypatch, capsys):
    monkeypatch.delenv(variables.PLAN, raising=False)
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_as_the_program_of_a_job_it_runs_in_the_nodes_place(local, monkeypatch, capsys, tmp_path):
    from azureml_elastic.node.__main__ import main

    plan = Plan(
        resources=ElasticResources(max_instance_count=1),
        rendezvous=local,
        name="run",
    )
    monkeypatch.setenv(variables.PLAN, plan.to_json())
    monkeypatch.setenv(variables.RUN_DIR, str(tmp_path / "run"))
    assert main(["--", sys.executable, "-m", "azureml_elastic.node.diagnostics.doctor", "--advertise", "lo"]) == 0
    assert "127.0.0.1 of lo" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "x", "a.b", "a.!!.c", f"a.{base64.urlsafe_b64encode(b'[1]').decode()}.c"])
def test_a_text_that_is_no_token_has_no_claims(text):
    assert claims_of(text) == {}


def test_peers_of_both_versions():
    assert command.read_peer("10.0.0.5:29400") == ("10.0.0.5", 29400)
    assert command.read_peer("[fd00::5]:29400") == ("fd00::5", 29400)


def test_a_login_that_is_refused_is_no_missing_role():
    assert "role" not in why_refused("AuthenticationFailed", OBJECT, "wsstore", ACCOUNT)
