"""Client for the jobs of an Azure ML workspace, over HTTP and without azure-ai-ml, which nodes do not have.

Jobs are read, submitted and cancelled at the resource manager; the states of a pipeline's steps are in the workspace's
run history. Sources: the REST reference "Machine Learning, Jobs" and the calls of ``MLClient``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import (
    JobRefused,
    TableForbidden,
    TableUnavailable,
    WorkspaceForbidden,
    WorkspaceUnavailable,
)
from azureml_elastic.node.azure.credentials import developer_credential
from azureml_elastic.node.azure.http import AzureError, HttpRequest, Reply, fetch
from azureml_elastic.node.azure.workspace import ARM_URL, WORKSPACE_API, cloud_of, workspace_of

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

_JOBS_API = "2025-01-01-preview"
_PIPELINES_API = "2024-01-01-preview"
_CANCEL_API = "2023-02-01-preview"
_ML_SCOPE = "https://ml.azure.com/.default"
_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_FRACTION = re.compile(r"\.\d+")


@dataclass(frozen=True)
class RunRecord:
    """Entry of a job or a step in the run history; ``started`` and ``ended`` are ``None`` before these events."""

    name: str
    display_name: str
    status: str
    created: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


def workspace_id(environment: NodeEnvironment) -> str:
    """Return the quoted id of the workspace of the job whose environment this is.

    Raises:
        UsageError: the environment is not that of an Azure ML job.
    """
    return quote(workspace_of(environment).id)


def developer_jobs(environment: NodeEnvironment) -> WorkspaceJobs:
    """Return the client for the jobs of a workspace with the developer's own login, without sending a request.

    Raises:
        UsageError: the environment names no workspace, or its cloud is unknown.
        MissingExtra: azure-identity is not installed.
    """
    token = developer_credential().token
    assert token is not None
    return WorkspaceJobs(workspace_id(environment), token, cloud_of(environment).arm_url)


class WorkspaceJobs:
    """Client for the jobs of one workspace.

    All methods raise ``WorkspaceForbidden`` if the identity lacks a role, and ``WorkspaceUnavailable`` if a service
    does not respond.

    Args:
        token: credential of an identity that may read and submit jobs.
    """

    def __init__(self, workspace: str, token: TokenCredential, arm_url: str = ARM_URL) -> None:
        self.workspace = workspace
        self._token = token
        self._arm_url = arm_url
        self._history = ""
        self.now = datetime.min.replace(tzinfo=timezone.utc)
        """Server time of the run history's last response, the only clock that times of jobs are compared with."""

    def document(self, name: str) -> dict[str, Any] | None:
        """Return the properties of a job in the API version that submits its kind, ``None`` if it does not exist."""
        properties = self._document(name, _PIPELINES_API)
        if properties is None or properties.get("jobType") == "Pipeline":
            return properties
        # Fields such as dockerArgsList are younger than the version of pipelines.
        return self._document(name, _JOBS_API)

    def _document(self, name: str, version: str) -> dict[str, Any] | None:
        return self._resource("jobs", name, version, f"the job {name!r}")

    def _resource(self, kind: str, name: str, version: str, what: str) -> dict[str, Any] | None:
        """Return the properties of a resource of the workspace, ``None`` if it does not exist."""
        reply = self._arm("GET", f"/{kind}/{quote(name, safe='')}", version, what)
        if reply.status == HTTPStatus.NOT_FOUND:
            return None
        match reply.document:
            case {"properties": dict(properties)} if reply.status == HTTPStatus.OK:
                return properties
        raise _unexpected(reply, what)

    def newest(self) -> list[tuple[str, str]]:
        """Return the names of the newest jobs, those on the first page of the workspace's list, with display names."""
        reply = self._arm("GET", "/jobs", _JOBS_API, "the jobs")
        match reply.document:
            case {"value": list(jobs)} if reply.status == HTTPStatus.OK:
                return [(str(job["name"]), str((job.get("properties") or {}).get("displayName") or "")) for job in jobs]
        raise _unexpected(reply, "the jobs")

    def submit(self, name: str, properties: Mapping[str, Any]) -> bool:
        """Submit a job; return false if a job of this name exists.

        Raises:
            JobRefused: the workspace rejects the job permanently.
        """
        version = _PIPELINES_API if properties.get("jobType") == "Pipeline" else _JOBS_API
        body = {"properties": dict(properties)}
        reply = self._arm("PUT", f"/jobs/{quote(name, safe='')}", version, f"the submission of {name!r}", body)
        if reply.status in (HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.ACCEPTED):
            return True
        # Of two processes that submit a job of one name the second is refused, with either status.
        if reply.status == HTTPStatus.CONFLICT or (
            reply.status == HTTPStatus.BAD_REQUEST and self.document(name) is not None
        ):
            return False
        if HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise JobRefused(f"The workspace refuses the job {name!r} (HTTP {reply.status}: {_reason(reply)}).")
        raise _unexpected(reply, f"the submission of {name!r}")

    def cancel(self, name: str) -> None:
        """Request the cancellation of a job; no effect if it has ended or does not exist."""
        self._arm("POST", f"/jobs/{quote(name, safe='')}/cancel", _CANCEL_API, f"the end of {name!r}", {})

    def record(self, name: str) -> RunRecord | None:
        """Return the run history's entry of a job, ``None`` if it does not exist."""
        run = self._history_of(f"/runs/{quote(name, safe='')}", f"the run {name!r}")
        return None if run is None else _record(run)

    def children(self, name: str) -> list[RunRecord] | None:
        """Return the run history's entries of a pipeline's steps, ``None`` if the pipeline does not exist."""
        found: list[RunRecord] = []
        address = f"/runs/{quote(name, safe='')}/children"
        while address:
            page = self._history_of(address, f"the steps of {name!r}")
            if page is None:
                return None
            found += [_record(run) for run in page.get("value") or []]
            address = str(page.get("nextLink") or "")
        return found

    def log_files(self, name: str) -> dict[str, str]:
        """Return the addresses of a job's log files by name, such as ``user_logs/std_log.txt``; they expire."""
        details = self._history_of(f"/runs/{quote(name, safe='')}/details", f"the logs of {name!r}")
        return dict((details or {}).get("logFiles") or {})

    def compute(self, name: str) -> dict[str, Any] | None:
        """Return the properties of a compute, ``None`` if it does not exist."""
        found = self._resource("computes", name, WORKSPACE_API, f"the compute {name!r}")
        return None if found is None else dict(found.get("properties") or {})

    def datastore(self, name: str) -> dict[str, Any] | None:
        """Return the properties of a datastore, ``None`` if it does not exist."""
        return self._resource("datastores", name, WORKSPACE_API, f"the datastore {name!r}")

    def _history_of(self, address: str, what: str) -> dict[str, Any] | None:
        """Return a document of the run history, given its path or URL, ``None`` if it does not exist."""
        self._history = self._history or self._find_history()
        url = address if "://" in address else f"{self._history}{address}"
        if urlsplit(url)[:2] != urlsplit(self._history)[:2]:  # the token must be sent to this server only
            raise WorkspaceUnavailable(f"The run history gives {what} at another server, {urlsplit(url).netloc!r}.")
        reply = self._send(HttpRequest("GET", url), _ML_SCOPE, what)
        if reply.status == HTTPStatus.NOT_FOUND:
            return None
        if reply.status != HTTPStatus.OK or not isinstance(reply.document, dict):
            raise _unexpected(reply, what)
        try:
            self.now = parsedate_to_datetime(reply.headers["date"])
        except (KeyError, ValueError) as error:
            raise WorkspaceUnavailable(f"The run history gives {what} without the time of its answer.") from error
        return reply.document

    def _find_history(self) -> str:
        """Return the URL of the workspace's run history."""
        reply = self._arm("GET", "", WORKSPACE_API, "the workspace")
        match reply.document:
            case {"properties": {"discoveryUrl": str(url)}} if reply.status == HTTPStatus.OK:
                reply = self._send(HttpRequest("GET", url), _ML_SCOPE, "the workspace's addresses")
                match reply.document:
                    case {"history": str(address)} if reply.status == HTTPStatus.OK:
                        return f"{address.rstrip('/')}/history/v1.0{self.workspace}"
        raise _unexpected(reply, "the workspace's addresses")

    def _arm(self, method: str, path: str, version: str, what: str, body: Mapping[str, Any] | None = None) -> Reply:
        url = f"{self._arm_url}{self.workspace}{path}?api-version={version}"
        return self._send(HttpRequest(method, url, json=body), f"{self._arm_url}/.default", what)

    def _send(self, request: HttpRequest, scope: str, what: str) -> Reply:
        try:
            reply = fetch(request, what, token=self._token, scope=scope)
        except TableForbidden as error:
            raise WorkspaceForbidden(f"The identity gets no token for {what}: {error}") from error
        except TableUnavailable as error:
            raise WorkspaceUnavailable(str(error)) from error
        except AzureError as error:
            reason = str(error).strip().partition("\n")[0]
            text = f"The login gives no token for {what}: {reason}. Log in again: az login."
            raise WorkspaceUnavailable(text) from error
        if reply.status in _REFUSED:
            raise WorkspaceForbidden(
                f"The identity has no access to {what} of workspace {self.workspace.rpartition('/')[2]!r} "
                f"(HTTP {reply.status}: {_reason(reply)}). Grant it the role 'AzureML Data Scientist' on the workspace."
            )
        return reply


def _record(run: Mapping[str, Any]) -> RunRecord:
    return RunRecord(
        name=str(run.get("runId")),
        display_name=str(run.get("displayName") or ""),
        status=str(run.get("status")),
        created=_time(run.get("createdUtc")),
        started=_time(run.get("startTimeUtc")),
        ended=_time(run.get("endTimeUtc")),
        tags=run.get("tags") or {},
    )


def _time(text: object) -> datetime | None:
    """Parse a time of the run history: UTC, with up to seven digits of a second."""
    if not text:
        return None
    time = datetime.fromisoformat(_FRACTION.sub("", str(text)).replace("Z", "+00:00"))
    return time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time


def _reason(reply: Reply) -> str:
    match reply.document:
        case {"error": {"message": str(message)}}:
            return message.strip().splitlines()[0] if message.strip() else "no reason"
    return "no reason"


def _unexpected(reply: Reply, what: str) -> WorkspaceUnavailable:
    return WorkspaceUnavailable(f"The workspace does not give {what} (HTTP {reply.status}: {_reason(reply)}).")
