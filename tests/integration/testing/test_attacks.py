"""Random and hostile requests to a local workspace in which a job runs; ``python -m nox -s attack`` sends many."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import threading
from http.client import HTTPException, HTTPSConnection
from urllib.parse import quote, urlsplit

import pytest

from azureml_elastic.testing import LocalWorkspace, Pool
from azureml_elastic.testing.api.history import API_HOST
from azureml_elastic.testing.api.resources import ARM_HOST
from azureml_elastic.testing.storage import StorageAccount
from tests.support.http_attacks import (
    BATCH,
    REQUESTS,
    TARGETS,
    attack,
    exchange,
    random_json,
    random_request,
    statuses,
)
from tests.support.waiting import until

ROOT = (
    "/subscriptions/00000000-0000-0000-0000-0000000000aa/resourceGroups/local"
    "/providers/Microsoft.MachineLearningServices/workspaces/local"
)
SIGNED_IN = {"Authorization": "Bearer x"}
BLOBS = "/azureml-blobstore"
OTHER = "/other"
"""A container that the job does not need: who has the key may delete it."""

SECRET = "what nobody may read"

COMMAND = {
    "jobType": "Command",
    "command": "exit 0",
    "computeId": f"{ROOT}/computes/cluster",
    "inputs": {"data": {"uri": "azureml://datastores/workspaceblobstore/paths/data/", "jobInputType": "uri_folder"}},
    "outputs": {"model": {"jobOutputType": "uri_folder", "mode": "Upload"}},
    "environmentVariables": {"A": "1"},
    "distribution": {"processCountPerInstance": 1, "distributionType": "PyTorch"},
    "resources": {"instanceCount": 1},
    "limits": {"timeout": "PT1M"},
}
SPEC = {"type": "command", "command": "exit 0", "inputs": {}, "outputs": {"model": {"type": "uri_folder"}}}
PIPELINE = {
    "jobType": "Pipeline",
    "computeId": f"{ROOT}/computes/cluster",
    "settings": {},
    "jobs": {"node_0": {"type": "command", "componentId": f"{ROOT}/components/c/versions/1"}},
}
COMPONENT = {"properties": {"componentSpec": SPEC}}
CODE = {"properties": {"codeUri": f"https://{StorageAccount.blob_host}{BLOBS}/code"}}


def assets(name):
    kinds = ("codes", "environments", "components", "data", "models")
    return [(ARM_HOST, f"{ROOT}/{kind}/{name}/versions/1") for kind in kinds]


PLACES = (
    [(ARM_HOST, f"{ROOT}{rest}") for rest in ("", "/computes", "/computes/cluster", "/datastores?isDefault=true")]
    + [
        (ARM_HOST, f"{ROOT}/datastores/workspaceblobstore/listSecrets"),
        (ARM_HOST, f"{ROOT}/codes/x/startPendingUpload"),
    ]
    + [(ARM_HOST, f"{ROOT}/startPendingUpload"), (ARM_HOST, f"{ROOT}/environments/a/versions/1/b/c")]
    + [(API_HOST, f"/history{ROOT}{rest}") for rest in ("/runs/known", "/runs/known/details", "/runs/known/children")]
    + [(API_HOST, f"/history{ROOT}{rest}") for rest in ("/rundata", "/dataversion/batchGetResolvedUris")]
    + [(API_HOST, "/discovery"), (API_HOST, "/logs/known/user_logs/std_log.txt")]
    + [(StorageAccount.blob_host, target) for target in (f"{OTHER}?restype=container&comp=list", f"{OTHER}/a/b")]
    + [(StorageAccount.table_host, target) for target in ("/Tables", "/t()", "/t(PartitionKey='p',RowKey='r')")]
    + assets("c")
)
DOCUMENTS = (
    {"properties": COMMAND},
    {"properties": PIPELINE},
    COMPONENT,
    CODE,
    {"runId": "known"},
    {"values": ["azureml-output/known/model"]},
    {"displayName": "x", "tags": {"a": "b"}},
    {"expirableSecret": True},
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.txt").write_text(SECRET)
    with LocalWorkspace(pools={"cluster": Pool(nodes=4)}, folder=folder / "workspace") as workspace:
        proxy = urlsplit(os.environ["HTTPS_PROXY"])
        workspace.gateway = (proxy.hostname, proxy.port)
        workspace.trust = ssl.create_default_context(cafile=os.environ["REQUESTS_CA_BUNDLE"])
        workspace.outside = folder / "outside"
        for container in (BLOBS, OTHER):
            workspace._storage.make_container(container.strip("/"))
        yield workspace


@pytest.fixture(autouse=True)
def unharmed(workspace, capfd):
    """No thread of a connection stays, no handler fails, and no file outside of the workspace's folder changes."""
    before = set(threading.enumerate())
    files = outside(workspace)
    yield
    until(lambda: set(threading.enumerate()) <= before)
    assert "Traceback" not in capfd.readouterr().err
    assert outside(workspace) == files


def outside(workspace):
    """Return the files around the workspace's folder with their content and times."""
    own = workspace.outside.parent / "workspace"
    found = (path for path in workspace.outside.parent.rglob("*") if own not in (path, *path.parents))
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


class Client:
    """A client that keeps a connection to each host."""

    def __init__(self, workspace):
        self._workspace = workspace
        self._connections = {}

    def call(self, host, target, method="GET", document=None, headers=SIGNED_IN):
        """Return the status and the body of a response, 0 where the server ended the connection without one."""
        if host not in self._connections:
            self._connections[host] = HTTPSConnection(
                *self._workspace.gateway, timeout=60, context=self._workspace.trust
            )
            self._connections[host].set_tunnel(host)
            self._connections[host].connect()
        connection = self._connections[host]
        body = document if isinstance(document, bytes | None) else json.dumps(document).encode()
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in {"Host": host, **headers, "Content-Length": str(len(body or b""))}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            found = response.status, response.read()
        except (HTTPException, ConnectionError, ssl.SSLError):
            found = 0, b""
        if found[0] == 0 or response.will_close:
            self._connections.pop(host).close()
        return found

    def close(self):
        for connection in self._connections.values():
            connection.close()
        self._connections = {}


@pytest.fixture
def client(workspace):
    with contextlib.closing(Client(workspace)) as client:
        yield client


@pytest.fixture
def job(workspace, client):
    """A job that ends, with an output, once its file is there."""
    name, file = "known", workspace.outside.parent / "workspace" / "go on"
    command = f"while [ ! -e '{file}' ]; do sleep 0.1; done; echo done; echo trained > ${{{{outputs.model}}}}/m.txt"
    properties = {**COMMAND, "command": command, "limits": {"timeout": "PT2H"}}
    assert client.call(ARM_HOST, f"{ROOT}/jobs/{name}", "PUT", {"properties": properties})[0] == 201
    yield name
    file.touch()
    assert workspace.wait(name, 60) == "Completed"
    assert workspace.log(name) == "done\n"
    with workspace._storage.container("azureml-blobstore") as container:
        assert container.download_blob(f"azureml/{name}/model/m.txt").readall() == b"trained\n"
    client.close()


def changed(choose, document):
    """Return a copy of a JSON value with something else at a random place of it."""
    if not isinstance(document, dict) or not document or choose.random() < 0.2:
        return random_json(choose)
    name = choose.choice(sorted(document))
    kept = {key: value for key, value in document.items() if key != name or choose.random() < 0.9}
    return {**kept, name: changed(choose, document[name])} if name in kept else kept


def test_random_requests_and_documents(workspace, client, job):
    names = iter(range(REQUESTS))
    client.call(*assets("c")[2], "PUT", COMPONENT)
    accepted = []

    @attack
    def send(choose):
        for number in range(BATCH):
            if number < BATCH // 10:
                received = exchange(workspace.gateway, random_request(choose, ("/token?resource=x", "/token")))
                assert all(status < 500 or status in (501, 502, 505) for status in statuses(received)), received
                continue
            host, target = choose.choice(PLACES)
            document = choose.choice(DOCUMENTS)
            method = choose.choice(["GET", "GET", "PUT", "POST", "PATCH", "DELETE", "HEAD", "MERGE", "OPTIONS"])
            if choose.random() < 0.1:
                host, target, method = ARM_HOST, f"{ROOT}/jobs/random-{next(names)}", "PUT"
            elif choose.random() < 0.1:
                target = choose.choice([each for each in TARGETS if each.isascii()])
            if choose.random() < 0.7:
                document = changed(choose, document)
            headers = SIGNED_IN if choose.random() < 0.9 else {}
            status, answer = client.call(host, target, method, document, headers)
            # The emulators of the storage have errors of their own.
            own = b"local workspace" in answer or not host.startswith("devstore")
            assert status < 500 or status in (501, 505) or not own, (method, target, document, answer)
            if status == 201 and "/jobs/" in target:
                accepted.append(target.rpartition("/")[2])

    for name in accepted:
        # A changed document may hold a limit of time, which cancels its job.
        assert workspace.wait(name, 120) in ("Completed", "Failed", "Canceled")
    client.close()
    listed = json.loads(client.call(ARM_HOST, f"{ROOT}/jobs")[1])["value"]
    assert {each["name"] for each in listed} >= {"known", *accepted}


@pytest.mark.parametrize("host", [ARM_HOST, API_HOST])
def test_requests_without_a_token_are_refused(client, host):
    for headers in ({}, {"Authorization": "Basic x"}, {"Authorization": "Bearer "}):
        for method in ("GET", "PUT", "DELETE"):
            assert client.call(host, f"{ROOT}/jobs/stranger", method, {"properties": COMMAND}, headers)[0] == 401
    assert client.call(ARM_HOST, f"{ROOT}/jobs/stranger")[0] == 404


ELSEWHERE = ("../../../outside", "a/../../../../outside", "./../../../outside", "/../outside", "\0")


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_job_reads_and_writes_no_file_outside_of_the_workspace(client, workspace, path):
    datastore = f"azureml://datastores/workspaceblobstore/paths/{path}"
    blob = f"https://{StorageAccount.blob_host}{BLOBS}/{quote(path, safe='')}"
    container = f"https://{StorageAccount.blob_host}/{quote('../' + path, safe='')}/x"
    documents = [
        *({**COMMAND, "codeId": address} for address in (datastore, blob, container)),
        *(
            {**COMMAND, "inputs": {"x": {"uri": address, "mode": mode}}}
            for address in (datastore, blob)
            for mode in MODES
        ),
        *(
            {**COMMAND, "outputs": {"x": {"uri": address, "mode": mode}}}
            for address in (datastore, blob)
            for mode in MODES
        ),
        {**COMMAND, "inputs": {path: {"uri": "azureml://datastores/workspaceblobstore/paths/a/", "mode": "Download"}}},
        {**COMMAND, "outputs": {path: {"mode": "Upload"}}},
        {**PIPELINE, "jobs": {path: PIPELINE["jobs"]["node_0"]}},
    ]
    client.call(*assets("c")[2], "PUT", COMPONENT)
    for document in documents:
        status, answer = client.call(ARM_HOST, f"{ROOT}/jobs/traversal", "PUT", {"properties": document})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "UserError"), (document, answer)
    for name in (path, f"x/{path}", ".."):
        target = f"{ROOT}/jobs/{quote(name, safe='')}"
        assert client.call(ARM_HOST, target, "PUT", {"properties": COMMAND})[0] in (400, 404)


MODES = ("Download", "ReadOnlyMount", "Upload")


def test_a_blob_whose_name_leads_elsewhere_is_not_written(client, workspace):
    """The emulator stores it; a node that mounts or downloads the folder must not get it as a file elsewhere."""
    for name in ("../../../outside/written.txt", f"/{workspace.outside}/written.txt"):
        target = f"{BLOBS}/{quote('trap/' + name, safe='')}"
        headers = {**SIGNED_IN, "x-ms-blob-type": "BlockBlob", "x-ms-version": "2021-08-06"}
        assert client.call(StorageAccount.blob_host, target, "PUT", b"x", headers)[0] == 201
    for number, mode in enumerate(MODES[:2]):
        inputs = {"x": {"uri": "azureml://datastores/workspaceblobstore/paths/trap/", "mode": mode}}
        document = {"properties": {**COMMAND, "inputs": inputs}}
        assert client.call(ARM_HOST, f"{ROOT}/jobs/trap-{number}", "PUT", document)[0] == 201
        assert workspace.wait(f"trap-{number}", 60) == "Failed"
        record = json.loads(client.call(API_HOST, f"/history{ROOT}/runs/trap-{number}")[1])
        assert record["error"]["error"]["code"] == "UserError"
        assert "leads out of it" in record["error"]["error"]["message"]


def test_no_target_shows_a_file(client, workspace):
    up = "../" * 12
    secret = workspace.outside / "secret.txt"
    for path in (
        str(secret),
        f"{up}{secret}",
        f"..{secret}",
        f"%2e%2e/%2e%2e{secret}",
        quote(f"{up}{secret}", safe=""),
    ):
        for host, before in (
            *((API_HOST, f"/logs/known/{start}") for start in ("", "user_logs/")),
            *((ARM_HOST, f"{ROOT}/{kind}/") for kind in ("jobs", "datastores", "computes", "environments", "codes")),
            (StorageAccount.blob_host, f"{BLOBS}/"),
            (StorageAccount.table_host, "/"),
        ):
            assert SECRET.encode() not in client.call(host, before + path)[1]
        assert SECRET.encode() not in exchange(workspace.gateway, f"GET /{path} HTTP/1.1\r\n\r\n".encode())
        assert SECRET.encode() not in exchange(workspace.gateway, f"GET file://{path} HTTP/1.1\r\n\r\n".encode())


def test_a_tunnel_within_a_connection_is_refused(client):
    assert client.call(ARM_HOST, f"{API_HOST}:443", "CONNECT")[0] == 400
