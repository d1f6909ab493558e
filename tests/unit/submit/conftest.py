"""An Azure ML workspace in memory: the part of ARM and of Blob Storage that a submission talks to.

The real ``MLClient`` runs unchanged above it. Only the lowest layer, the adapter of ``requests`` that would
open a socket, is another one.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.support.rest_models import problems_of_job

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what azure-ai-ml does with marshmallow while it is imported
        from azure.ai.ml import MLClient

        from azureml_elastic.submit import ElasticCommandJob  # noqa: F401 this registers it with azure-ai-ml
except ModuleNotFoundError:
    _USERS = """bodies compilation composition conversion paths_on_compute pools presets references
    request_bodies replacement_bodies sdk_hooks service_models step_edits steps submission validate_call yaml_job
    yaml_overrides yaml_round_trip yaml_schema"""
    collect_ignore = [f"test_{name}.py" for name in _USERS.split()]

SUBSCRIPTION = "00000000-0000-0000-0000-0000000000aa"
GROUP = "group"
WORKSPACE = "workspace"
ROOT = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}"
    f"/providers/Microsoft.MachineLearningServices/workspaces/{WORKSPACE}"
)
ACCOUNT = "account.blob.core.windows.net"
CONTAINER = "azureml-blobstore"
DATASTORE = {
    "id": f"{ROOT}/datastores/workspaceblobstore",
    "name": "workspaceblobstore",
    "type": "Microsoft.MachineLearningServices/workspaces/datastores",
    "properties": {
        "datastoreType": "AzureBlob",
        "accountName": "account",
        "containerName": CONTAINER,
        "endpoint": "core.windows.net",
        "protocol": "https",
        "isDefault": True,
        "credentials": {"credentialsType": "AccountKey"},
    },
}
BLOB_HEADERS = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", "x-ms-version": "2024-01-01"}


@dataclass
class Answer:
    """What the workspace says to one request."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Workspace:
    """The state that a submission leaves behind."""

    entities: dict[str, dict[str, Any]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def answer(self, request) -> Answer:
        """Return the answer to one request of the SDK."""
        url = urlsplit(request.url)
        path = unquote(url.path)
        self.requests.append(f"{request.method} {url.netloc}{path}")
        if url.netloc == ACCOUNT:
            return self._blob(request, path)
        if url.netloc == "management.azure.com":
            text = request.body or b"{}"
            return self._arm(request.method, path, json.loads(text), parse_qs(url.query))
        raise AssertionError(f"no such server in this workspace: {request.method} {request.url}")

    def _arm(self, method: str, path: str, body: dict[str, Any], query: dict[str, list[str]]) -> Answer:
        if not path.startswith(ROOT):
            raise AssertionError(f"no such resource in this workspace: {method} {path}")
        rest = path[len(ROOT) :]
        if rest == "":
            return Answer(200, _workspace())
        if rest == "/datastores":
            return Answer(200, {"value": [DATASTORE]})
        if rest == "/datastores/workspaceblobstore/listSecrets":
            return Answer(200, {"secretsType": "Sas", "sasToken": "sig=fake"})
        if rest == "/datastores/workspaceblobstore":
            return Answer(200, DATASTORE)
        if match := re.fullmatch(r"/computes/(gpu|other)", rest):
            return Answer(200, _compute(path, match[1]))
        if method == "POST" and rest.endswith("/startPendingUpload"):
            return Answer(200, _pending_upload(rest))
        if method == "PUT":
            entity = {"id": path, "name": path.rsplit("/", 1)[1], "systemData": {"createdBy": "me"}, **body}
            self.entities[rest] = entity
            if rest.startswith("/jobs/"):
                assert problems_of_job(body) == []
                self.jobs.append(body)
                entity = {**entity, "properties": {**entity["properties"], "status": "NotStarted"}}
            return Answer(201, entity)
        if method == "GET" and rest in self.entities:
            return Answer(200, self.entities[rest])
        if method == "GET" and rest.endswith("/versions"):
            found = [entity for key, entity in self.entities.items() if key.startswith(f"{rest}/")]
            return Answer(200, {"value": found})
        if method == "GET":
            return Answer(404, {"error": {"code": "NotFound", "message": f"{rest} is not there"}})
        raise AssertionError(f"this workspace cannot do: {method} {rest} {query}")

    def _blob(self, request, path: str) -> Answer:
        if request.method == "PUT" and "comp=metadata" in str(request.url):
            self.metadata[path] = _metadata(request)
            return Answer(200, headers=BLOB_HEADERS)
        if request.method == "PUT":
            body = request.body
            self.blobs[path] = body.read() if hasattr(body, "read") else (body or b"")
            self.metadata[path] = _metadata(request)
            return Answer(201, headers=BLOB_HEADERS)
        if request.method == "HEAD" and path in self.blobs:
            return Answer(200, headers=BLOB_HEADERS | self.metadata[path] | {"Content-Length": "0"})
        if request.method == "GET":
            return Answer(200, headers={"Content-Type": "application/xml"}, body=self._listing(request))
        return Answer(404, headers={"x-ms-error-code": "BlobNotFound"})

    def _listing(self, request) -> bytes:
        prefix = parse_qs(urlsplit(request.url).query).get("prefix", [""])[0]
        names = [path.split("/", 2)[2] for path in self.blobs]
        found = "".join(f"<Blob><Name>{name}</Name></Blob>" for name in names if name.startswith(prefix))
        return f"<EnumerationResults><Blobs>{found}</Blobs></EnumerationResults>".encode()


def _metadata(request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower().startswith("x-ms-meta-")}


def _workspace() -> dict[str, Any]:
    return {
        "id": ROOT,
        "name": WORKSPACE,
        "location": "westeurope",
        "type": "Microsoft.MachineLearningServices/workspaces",
        "identity": {"type": "SystemAssigned"},
        "properties": {
            "workspaceId": "00000000-0000-0000-0000-0000000000bb",
            "discoveryUrl": "https://westeurope.api.azureml.ms/discovery",
        },
    }


def _pending_upload(rest: str) -> dict[str, Any]:
    container = f"https://{ACCOUNT}/{rest.split('/')[2]}"
    return {
        "pendingUploadId": "upload",
        "pendingUploadType": "TemporaryBlobReference",
        "blobReferenceForConsumption": {
            "blobUri": container,
            "storageAccountArmId": "account",
            "credential": {"credentialType": "SAS", "sasUri": f"{container}?sig=fake"},
        },
    }


def _compute(path: str, name: str) -> dict[str, Any]:
    return {
        "id": path,
        "name": name,
        "location": "westeurope",
        "properties": {"computeType": "AmlCompute", "provisioningState": "Succeeded", "properties": {}},
    }


class Adapter:
    """What ``requests`` sends by: an adapter that asks the workspace instead of opening a socket."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def send(self, request, **_):
        import requests
        from urllib3 import HTTPResponse

        answer = self._workspace.answer(request)
        headers = dict(answer.headers)
        body = answer.body if isinstance(answer.body, bytes) else b""
        if answer.body is not None and not isinstance(answer.body, bytes):
            body = json.dumps(answer.body).encode()
            headers["Content-Type"] = "application/json"
        headers.setdefault("Content-Length", str(len(body)))
        response = requests.Response()
        response.status_code = answer.status
        response.reason = "OK"
        response.headers.update(headers)
        response.url = request.url
        response.request = request
        response.raw = HTTPResponse(io.BytesIO(body), headers=headers, status=answer.status, preload_content=False)
        return response

    def close(self) -> None:
        pass


class Credential:
    """Mints tokens that name the audience that Azure ML asks for, without a signature."""

    def get_token(self, *scopes, **_):
        from azure.core.credentials import AccessToken

        expires = int(time.time()) + 3600
        claims = {"aud": "https://ml.azure.com", "tid": "tenant", "oid": "object", "exp": expires}
        parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in ({"alg": "none"}, claims)]
        return AccessToken(".".join([*(part.rstrip("=") for part in parts), ""]), expires)


def pytest_collection_modifyitems(items):
    """Let azure-ai-ml, and nothing else, use what marshmallow 3 and Python 3.12 have announced to drop."""
    if "marshmallow" not in sys.modules:
        return
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("ignore::marshmallow.warnings.RemovedInMarshmallow4Warning"))
            item.add_marker(
                pytest.mark.filterwarnings(r"ignore:datetime\.datetime\.utc:DeprecationWarning:azure\.ai\.ml\.")
            )


@pytest.fixture
def workspace() -> Workspace:
    """An empty workspace."""
    return Workspace()


@pytest.fixture
def client(workspace, monkeypatch):
    """The real client, whose requests end in the workspace."""
    import requests

    monkeypatch.setattr(requests.Session, "get_adapter", lambda _, url: Adapter(workspace))
    return MLClient(Credential(), SUBSCRIPTION, GROUP, WORKSPACE, enable_telemetry=False)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The user's cache of all tests, which is empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def folder(tmp_path, cache, monkeypatch):
    """The current folder: a training script in ``src``, a file in ``data``, and no cache but that of the tests."""
    project = tmp_path / "a project"
    for name in ("src", "data"):
        (project / name).mkdir(parents=True)
    (project / "data" / "a.txt").write_text("1")
    (project / "src" / "train.py").write_text("print('training')\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    # The SDK adds the properties of the git checkout that the folder is in: here none, wherever temporary files go.
    # A folder itself is no ceiling for what runs in it, but its parent is.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return project


def normalized(document: Any) -> Any:
    """Return the document with everything that differs from run to run named instead."""
    text = json.dumps(document)
    text = text.replace(ROOT, "<workspace>")
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uuid>", text)
    return json.loads(re.sub(r"[0-9a-f]{64}", "<sha256>", text))


@pytest.fixture
def sent(workspace):
    """Return the bodies of the submitted jobs, normalized."""
    return lambda: normalized(workspace.jobs)


@pytest.fixture
def components(workspace):
    """Return the specifications of the registered components, normalized."""
    return lambda: [
        normalized(entity["properties"]["componentSpec"])
        for key, entity in workspace.entities.items()
        if key.startswith("/components/")
    ]


@pytest.fixture
def arrived(client, workspace, sent, components):
    """Submit a job to an empty workspace and return all that has arrived: jobs, components, environments, uploads."""

    def submit(job):
        for state in (workspace.jobs, workspace.entities, workspace.blobs, workspace.metadata):
            state.clear()
        client.jobs.create_or_update(job)
        environments = {key: one for key, one in workspace.entities.items() if key.startswith("/environments/")}
        text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uuid>", json.dumps(environments))
        uploads = {path for path in workspace.blobs if "/LocalUpload/" in path}
        return {
            "jobs": comparable(sent()),
            "components": comparable(components()),
            "environments": json.loads(text),
            "uploads": uploads,
            "code": {path.split("/", 2)[2]: data for path, data in workspace.blobs.items() if path not in uploads},
        }

    return submit


def comparable(value):
    """Return a body without ``_source``, which says how the SDK has come by it, and without a node's name beside it.

    A node that is loaded from YAML bears in its body the name under which it stands there anyway.
    """
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: comparable(one) for key, one in value.items() if key != "_source"}
    for name, node in kept.items():
        if isinstance(node, dict) and "componentId" in node and node.get("name") == name:
            del node["name"]
    return kept
