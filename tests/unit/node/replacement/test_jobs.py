"""Requests to Azure ML, against a server with the same responses."""

import json
import threading
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import (
    JobRefused,
    TableForbidden,
    UsageError,
    WorkspaceForbidden,
    WorkspaceUnavailable,
)
from azureml_elastic.node.replacement.jobs import WorkspaceJobs, workspace_id

WORKSPACE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
NOW = "Sun, 22 Nov 2026 12:00:00 GMT"
SECRET = "token-that-nobody-may-see"


class Credential:
    def __init__(self):
        self.scopes = []

    def get_token(self, scope, **_):
        self.scopes.append(scope)
        return AccessToken(SECRET, 0)


class Server(ThreadingHTTPServer):
    """Answers by method and path with a status and a document."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = {}
        self.bodies = {}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def date_time_string(self, timestamp=None):
        return NOW

    def log_message(self, *_):
        pass

    def answer(self):
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.bodies[self.command, path] = json.loads(body) if body else None
        assert self.headers["Authorization"] == f"Bearer {SECRET}"
        status, document = self.server.answers.get((self.command, path), (404, {"error": {"message": "not there"}}))
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = answer  # noqa: N815 - the names are http.server's


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.answers["GET", WORKSPACE] = 200, {"properties": {"discoveryUrl": f"{server.url}/discovery"}}
        server.answers["GET", "/discovery"] = 200, {"history": f"{server.url}/here/"}
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def credential():
    return Credential()


@pytest.fixture
def jobs(server, credential):
    return WorkspaceJobs(WORKSPACE, credential, server.url)


def history(server, path, document, status=200):
    server.answers["GET", f"/here/history/v1.0{WORKSPACE}{path}"] = status, document


def test_a_job_is_read_submitted_and_cancelled(server, jobs, credential):
    server.answers["GET", f"{WORKSPACE}/jobs/a"] = 200, {"properties": {"jobType": "Pipeline"}}
    server.answers["PUT", f"{WORKSPACE}/jobs/b"] = 201, {}
    server.answers["POST", f"{WORKSPACE}/jobs/b/cancel"] = 202, {}
    assert jobs.document("a") == {"jobType": "Pipeline"}
    assert jobs.document("other") is None
    assert jobs.submit("b", {"jobType": "Pipeline", "jobs": {}}) is True
    assert server.bodies["PUT", f"{WORKSPACE}/jobs/b"] == {"properties": {"jobType": "Pipeline", "jobs": {}}}
    jobs.cancel("b")
    jobs.cancel("one that is not there")
    assert set(credential.scopes) == {f"{server.url}/.default"}


def test_computes_datastores_and_logs_are_read(server, jobs):
    compute = {"computeType": "AmlCompute", "properties": {"vmSize": "Standard_NC6", "vmPriority": "LowPriority"}}
    server.answers["GET", f"{WORKSPACE}/computes/spot"] = 200, {"properties": compute}
    server.answers["GET", f"{WORKSPACE}/computes/attached"] = 200, {"properties": {"computeType": "Kubernetes"}}
    server.answers["GET", f"{WORKSPACE}/datastores/blobs"] = 200, {"properties": {"containerName": "box"}}
    server.answers["GET", f"{WORKSPACE}/datastores/broken"] = 200, []
    assert jobs.compute("spot") == {"vmSize": "Standard_NC6", "vmPriority": "LowPriority"}
    assert jobs.compute("attached") == {}
    assert jobs.compute("gone") is None
    assert jobs.datastore("blobs") == {"containerName": "box"}
    assert jobs.datastore("gone") is None
    with pytest.raises(WorkspaceUnavailable, match="does not give the datastore 'broken'"):
        jobs.datastore("broken")
    history(server, "/runs/a/details", {"logFiles": {"user_logs/std_log.txt": "https://x/log?sig=s"}})
    assert jobs.log_files("a") == {"user_logs/std_log.txt": "https://x/log?sig=s"}
    history(server, "/runs/b/details", {"logFiles": None})
    assert jobs.log_files("b") == jobs.log_files("gone") == {}


@pytest.mark.parametrize("status", [409, 400])
def test_a_job_that_is_there_already_is_not_submitted_again(server, jobs, status):
    server.answers["PUT", f"{WORKSPACE}/jobs/b"] = status, {"error": {"message": "exists"}}
    server.answers["GET", f"{WORKSPACE}/jobs/b"] = 200, {"properties": {}}
    assert jobs.submit("b", {"jobType": "Command"}) is False


def test_a_refused_job_has_the_reason(server, jobs):
    server.answers["PUT", f"{WORKSPACE}/jobs/b"] = 400, {"error": {"message": "no such compute\nmore"}}
    with pytest.raises(JobRefused, match=r"HTTP 400: no such compute\)"):
        jobs.submit("b", {"jobType": "Command"})


def test_the_steps_come_in_pages_and_times_are_the_servers(server, jobs, credential):
    waiting = {"runId": "r1", "displayName": "node_0", "status": "Queued", "createdUtc": "2026-11-22T11:00:00.1234567Z"}
    ended = {
        "runId": "r2",
        "displayName": "node_1",
        "status": "Failed",
        "createdUtc": "2026-11-22T10:00:00+00:00",
        "startTimeUtc": "2026-11-22T10:30:00",
        "endTimeUtc": "2026-11-22T11:30:00.5Z",
    }
    more = f"{server.url}/here/history/v1.0{WORKSPACE}/more"
    history(server, "/runs/a/children", {"value": [waiting], "nextLink": more})
    history(server, "/more", {"value": [ended], "nextLink": None})
    first, second = jobs.children("a")
    assert (first.name, first.display_name, first.status) == ("r1", "node_0", "Queued")
    now = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
    assert jobs.now == now
    assert (now - first.created, first.started, first.ended) == (timedelta(hours=1), None, None)
    assert (now - second.started, now - second.ended) == (timedelta(hours=1.5), timedelta(hours=0.5))
    history(server, "/runs/a/children", {"value": [waiting], "nextLink": "https://elsewhere.example/more"})
    with pytest.raises(WorkspaceUnavailable, match=r"at another server, .elsewhere\.example."):
        jobs.children("a")
    assert jobs.children("other") is None
    assert jobs.record("other") is None
    assert "https://ml.azure.com/.default" in credential.scopes


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_the_role_and_no_secret(server, jobs, status):
    server.answers["GET", f"{WORKSPACE}/jobs/a"] = status, {"error": {"message": "no authorization"}}
    with pytest.raises(WorkspaceForbidden, match="AzureML Data Scientist") as refusal:
        jobs.document("a")
    assert "workspace 'w'" in str(refusal.value)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (f"{WORKSPACE}/jobs/a", (418, {"error": {}})),
        (f"{WORKSPACE}/jobs/a", (200, ["no object"])),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_may_pass(server, jobs, path, answer):
    server.answers["GET", path] = answer
    with pytest.raises(WorkspaceUnavailable, match="no reason"):
        jobs.document("a")


def test_a_redirect_is_not_followed_with_the_token(server, jobs):
    server.answers["GET", f"{WORKSPACE}/jobs/a"] = 302, {"error": {"message": "elsewhere"}}
    with pytest.raises(WorkspaceUnavailable, match="HTTP 302"):
        jobs.document("a")
    assert set(server.bodies) == {("GET", f"{WORKSPACE}/jobs/a")}


@pytest.mark.parametrize(
    ("trouble", "error", "said"),
    [
        (TableForbidden("the node gives no token"), WorkspaceForbidden, "no token for the job"),
        (ClientAuthenticationError("expired\nmore"), WorkspaceUnavailable, r"expired\. Log in again"),
    ],
)
def test_a_login_that_gives_no_token_may_give_one_later_or_another_identity_does(server, trouble, error, said):
    class NoLogin:
        def get_token(self, *_, **__):
            raise trouble

    with pytest.raises(error, match=said):
        WorkspaceJobs(WORKSPACE, NoLogin(), server.url).document("a")


def test_the_workspace_is_named_by_the_environment():
    environ = {
        "AZUREML_ARM_SUBSCRIPTION": "s",
        "AZUREML_ARM_RESOURCEGROUP": "a group",
        "AZUREML_ARM_WORKSPACE_NAME": "w",
    }
    assert workspace_id(NodeEnvironment.read(environ)) == WORKSPACE.replace("/g/", "/a%20group/")
    with pytest.raises(UsageError, match="AZUREML_ARM_WORKSPACE_NAME"):
        workspace_id(NodeEnvironment.read({**environ, "AZUREML_ARM_WORKSPACE_NAME": ""}))
