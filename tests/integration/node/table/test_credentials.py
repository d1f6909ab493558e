"""Tokens from a node that answers as Azure ML's do."""

import json
import logging
import ssl
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import TableForbidden, TableUnavailable, UsageError
from azureml_elastic.node.azure.credentials import STORAGE_SCOPE, NodeTokenCredential, choose_credential
from azureml_elastic.node.azure.http import HttpRequest, fetch
from azureml_elastic.node.table import open_table

PEM = serialization.Encoding.PEM


def token(text="t0ken", **fields):
    return 200, {"access_token": text, "expires_on": str(int(time.time()) + 3600), **fields}


def test_a_managed_identity_without_a_secret(serve):
    node = serve(lambda _call: token())
    environ = {"MSI_ENDPOINT": f"{node.url}/token", "DEFAULT_IDENTITY_CLIENT_ID": "id-7"}
    identity = NodeTokenCredential.managed(NodeEnvironment.read(environ), None)
    assert identity.get_token(STORAGE_SCOPE).token == "t0ken"
    (call,) = node.calls
    assert (call.method, call.path, call.headers["Metadata"]) == ("POST", "/token", "true")
    assert call.form == {"resource": "https://storage.azure.com", "client_id": "id-7"}
    assert "id-7" in identity.name


def test_a_node_that_only_takes_get(serve):
    node = serve(lambda call: token() if call.method == "GET" else (405, {}))
    identity = NodeTokenCredential.managed(NodeEnvironment.read({"MSI_ENDPOINT": f"{node.url}/token?v=1"}), "mine")
    assert identity.get_token(STORAGE_SCOPE).token == "t0ken"
    assert [call.method for call in node.calls] == ["POST", "GET"]
    assert node.calls[1].query == {"v": "1", "resource": "https://storage.azure.com", "client_id": "mine"}


def test_a_managed_identity_with_a_secret(serve):
    node = serve(lambda _call: token(expires_on="06/20/2089 02:57:58 +00:00"))
    environ = {"MSI_ENDPOINT": f"{node.url}/msi/token", "MSI_SECRET": "s3cret", "DEFAULT_IDENTITY_CLIENT_ID": "other"}
    found = NodeTokenCredential.managed(NodeEnvironment.read(environ), "mine").get_token(STORAGE_SCOPE)
    (call,) = node.calls
    assert (call.method, call.path) == ("GET", "/msi/token")
    assert call.query == {"api-version": "2017-09-01", "resource": "https://storage.azure.com", "clientid": "mine"}
    assert {name.lower(): value for name, value in call.headers.items()}["secret"] == "s3cret"
    assert found.expires_on == 3770074678


def test_the_identity_of_the_user(serve):
    node = serve(lambda _call: (200, {"token": "theirs", "expires_in": 3600}))
    identity = NodeTokenCredential.on_behalf_of(NodeEnvironment.read({"OBO_ENDPOINT": f"{node.url}/token"}))
    assert identity.get_token("https://management.azure.com/.default").token == "theirs"
    (call,) = node.calls
    assert (call.method, call.query) == ("GET", {"resource": "https://management.azure.com"})


def test_a_token_is_kept_until_shortly_before_it_expires(serve):
    now = 1_000_000.0
    node = serve(lambda _call: (200, {"access_token": f"t{len(node.calls)}", "expires_on": int(now) + 3600}))
    identity = NodeTokenCredential(
        "the user",
        NodeTokenCredential.on_behalf_of(NodeEnvironment.read({"OBO_ENDPOINT": node.url})).requests,
        lambda: now,
    )

    def ask(scope=STORAGE_SCOPE):
        return identity.get_token(scope, tenant_id="t", enable_cae=True).token

    assert [ask(), ask()] == ["t1", "t1"]
    assert ask("https://management.azure.com/.default") == "t2"
    now += 3299
    assert ask() == "t1"
    now += 2
    assert [ask(), ask()] == ["t3", "t3"]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"expires_on": "1700000000"}, 1700000000),
        ({"expires_on": 1700000000, "expires_in": 5}, 1700000000),
        ({"expiresOn": "2023-11-14T22:13:20.0000000+00:00"}, 1700000000),
        ({"expires_on": "11/14/2023 22:13:20 +00:00"}, 1700000000),
        ({"expires_on": "11/14/2023 10:13:20 PM +00:00"}, 1700000000),
        ({"expires_on": "whenever"}, 0),
        ({"expires_in": "100"}, 600),
        ({}, 500),
    ],
)
def test_the_ways_in_which_an_expiry_is_written(serve, fields, seconds):
    node = serve(lambda _call: (200, {"access_token": "t", **fields}))
    identity = NodeTokenCredential(
        "the user",
        NodeTokenCredential.on_behalf_of(NodeEnvironment.read({"OBO_ENDPOINT": node.url})).requests,
        lambda: 500.0,
    )
    assert identity.get_token(STORAGE_SCOPE).expires_on == seconds


def test_a_busy_node_is_asked_again_and_a_refusal_is_not(serve):
    answers = [(500, {}), None, (429, {}), token()]
    node = serve(lambda _call: answers.pop(0))
    assert (
        NodeTokenCredential.on_behalf_of(NodeEnvironment.read({"OBO_ENDPOINT": node.url}))
        .get_token(STORAGE_SCOPE)
        .token
        == "t0ken"
    )
    refusing = serve(lambda _call: (400, {"error": "invalid_request", "error_description": "Identity not found"}))
    with pytest.raises(TableForbidden, match=r"HTTP 400: Identity not found.*Storage Table Data Contributor"):
        NodeTokenCredential.managed(NodeEnvironment.read({"MSI_ENDPOINT": refusing.url}), None).get_token(STORAGE_SCOPE)
    assert len(refusing.calls) == 1
    odd = serve(lambda _call: (200, b"<html>access_token</html>"))
    with pytest.raises(TableForbidden, match="no token"):
        NodeTokenCredential.managed(NodeEnvironment.read({"MSI_ENDPOINT": odd.url}), None).get_token(STORAGE_SCOPE)


def test_auto_takes_the_first_identity_that_works(serve, caplog):
    managed = serve(lambda _call: token("of the compute"))
    user = serve(lambda _call: token("of the user"))
    nobody = serve(lambda _call: (400, {"error": "no identity assigned"}))
    string = {"AZURE_STORAGE_CONNECTION_STRING": "AccountKey=s3cret"}

    def chosen(**environ):
        with caplog.at_level(logging.DEBUG):
            login = choose_credential(TableRendezvous(), NodeEnvironment.read(environ | string))
        return login.connection_string or login.token.get_token(STORAGE_SCOPE).token

    assert chosen(MSI_ENDPOINT=managed.url, OBO_ENDPOINT=user.url) == "of the compute"
    assert chosen(MSI_ENDPOINT=nobody.url, OBO_ENDPOINT=user.url) == "of the user"
    assert chosen(OBO_ENDPOINT=user.url) == "of the user"
    assert chosen(MSI_ENDPOINT=nobody.url, OBO_ENDPOINT=nobody.url) == "AccountKey=s3cret"
    assert chosen() == "AccountKey=s3cret"
    assert "no identity assigned" in caplog.text
    assert "s3cret" not in caplog.text
    assert "of the user" not in caplog.text.replace("identity of the user", "")


def test_an_explicit_choice_takes_no_other(serve):
    nobody = serve(lambda _call: (400, {"error": "no identity assigned"}))
    user = serve(lambda _call: token("of the user"))
    environ = {"MSI_ENDPOINT": nobody.url, "OBO_ENDPOINT": user.url, "MINE": "AccountKey=s3cret"}
    login = choose_credential(
        TableRendezvous(credential="managed_identity", client_id="me"), NodeEnvironment.read(environ)
    )
    with pytest.raises(TableForbidden, match="client id me"):
        login.token.get_token(STORAGE_SCOPE)
    login = choose_credential(TableRendezvous(credential="on_behalf_of"), NodeEnvironment.read(environ))
    assert login.token.get_token(STORAGE_SCOPE).token == "of the user"
    rendezvous = TableRendezvous(credential="connection_string", connection_string_variable="MINE")
    login = choose_credential(rendezvous, NodeEnvironment.read(environ))
    assert login.connection_string == "AccountKey=s3cret"
    assert "s3cret" not in repr(login)
    login = choose_credential(TableRendezvous(credential="developer"), NodeEnvironment.read({}))
    assert "az login" in login.name
    login.token.close()
    with pytest.raises(UsageError, match=r"connection string in the environment variable MINE,.*not set"):
        choose_credential(rendezvous, NodeEnvironment.read({}))
    with pytest.raises(UsageError, match="OBO_ENDPOINT"):
        choose_credential(TableRendezvous(credential="on_behalf_of"), NodeEnvironment.read({}))


def test_the_address_must_be_one_of_http():
    with pytest.raises(UsageError, match="'file:///etc/passwd'"):
        NodeTokenCredential.on_behalf_of(NodeEnvironment.read({"OBO_ENDPOINT": "file:///etc/passwd"})).get_token(
            STORAGE_SCOPE
        )


def test_an_address_that_is_silent_is_unavailable_and_its_query_is_not_revealed(serve):
    node = serve(lambda _call: None)
    request = HttpRequest("GET", f"{node.url}/token?code=s3cret")
    with pytest.raises(TableUnavailable, match=r"/token does not answer the request for a token") as caught:
        fetch(request, "a token", direct=True, timeout=timedelta(seconds=3))
    assert "s3cret" not in str(caught.value)
    assert len(node.calls) > 1


def test_the_way_to_the_node_passes_no_proxy(serve, monkeypatch):
    node, proxy = serve(lambda _call: token()), serve(lambda _call: (502, {}))
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert (
        NodeTokenCredential.on_behalf_of(NodeEnvironment.read({"OBO_ENDPOINT": node.url}))
        .get_token(STORAGE_SCOPE)
        .token
        == "t0ken"
    )
    assert proxy.calls == []


def trusted(folder, monkeypatch):
    """Return the TLS context for servers on this machine that the SDK trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "this machine")])
    now = datetime.now(timezone.utc)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(signed.public_bytes(PEM) + private)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


def test_the_tables_calls_carry_the_nodes_token(serve, tmp_path, monkeypatch):
    context = trusted(tmp_path, monkeypatch)
    missing = {"odata.error": {"code": "ResourceNotFound", "message": {"value": "no such row"}}}
    account = serve(lambda _call: (404, missing), context)
    node = serve(lambda _call: token())
    rendezvous = TableRendezvous(endpoint=f"https://127.0.0.1:{account.port}")
    table = open_table(rendezvous, "run", NodeEnvironment.read({"MSI_ENDPOINT": node.url}))
    assert table.get("key") is None
    table.close()
    assert [call.headers["Authorization"] for call in account.calls] == ["Bearer t0ken"] * 2
    assert account.calls[1].path == "/azuremlelastic(PartitionKey='run',RowKey='key')"
    assert len(node.calls) == 1


def test_an_identity_without_the_role(serve, tmp_path, monkeypatch):
    context = trusted(tmp_path, monkeypatch)
    refusal = {"odata.error": {"code": "AuthorizationPermissionMismatch", "message": {"value": "not authorized"}}}
    account = serve(lambda _call: (403, refusal), context)
    node = serve(lambda _call: token())
    rendezvous = TableRendezvous(endpoint=f"https://127.0.0.1:{account.port}", client_id="me")
    with pytest.raises(TableForbidden) as caught:
        open_table(rendezvous, "run", NodeEnvironment.read({"MSI_ENDPOINT": node.url}))
    for part in (rendezvous.endpoint, "managed identity", "client id me", "'Storage Table Data Contributor'", "403"):
        assert part in str(caught.value)
    assert "t0ken" not in str(caught.value)


def test_opening_an_sqlite_table_imports_nothing_of_azure(tmp_path):
    code = (
        "import json, sys; from azureml_elastic.node.table import open_table; "
        "from azureml_elastic.config.rendezvous import TableRendezvous; "
        "open_table(TableRendezvous(endpoint=sys.argv[1]), 'run', {}).close(); "
        "print(json.dumps(sorted(name for name in sys.modules if name.partition('.')[0] == 'azure')))"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "t"], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
