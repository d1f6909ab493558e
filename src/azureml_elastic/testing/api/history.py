"""The workspace's data plane: the run history that ``stream``, ``list`` and ``download`` read.

What Azure ML returns for a submitted job is its document, with the additions of the service. These are those in the
responses to azure-ai-ml's own tests, which Microsoft publishes as ``sdk/ml/azure-ai-ml/tests/recordings`` in
Azure/azure-sdk-for-python, and those in the documentation of a run's properties ("Git integration for Azure Machine
Learning"). The default size of ``/dev/shm`` is one of them. The properties of pipelines are assumed.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.api.tracking import TRACKING_PATH, Tracking
from azureml_elastic.testing.jobs.runs import TERMINAL, Run, Runs, Status
from azureml_elastic.testing.messages import Answer, NotFound, Request, document

API_HOST = "local.api.azureml.ms"

_RUNS = r".*/workspaces/[^/]+(?:/experiment(?:id)?s/[^/]+)?/"
_ASSET = "azureml-output"
_SEPARATORS = 2
_SNAKE_CASE_SINCE = (1, 35)
_CAMEL_CASE = {"uri_folder": "UriFolder", "uri_file": "UriFile", "mltable": "MLTable"}
_PROGRESS_LOGS = {"Pipeline": "logs/azureml/executionlogs.txt", "Sweep": "azureml-logs/hyperdrive.txt"}
"""Names of the logs in which clients look for the progress of what consists of other runs."""


@dataclass
class History:
    """Handler of requests to the data plane."""

    runs: Runs
    tracking: Tracking

    def answer(self, request: Request) -> Answer:
        """Return the response to a request."""
        path = request.path
        if path.startswith("/discovery"):
            api = f"https://{API_HOST}"
            return document(dict.fromkeys(("api", "catalog", "experimentation", "gallery", "history", "studio"), api))
        if path.startswith(TRACKING_PATH):
            return self.tracking.answer(request)
        if match := re.fullmatch(r"/logs/([^/]+)/(.*)", path):
            log = self._log(self.runs.find(match[1]), match[2])
            return Answer(200, (("Content-Type", "text/plain; charset=utf-8"),), log)
        if path.endswith("/rundata"):
            return self._data(str(request.json().get("runId")), request.sdk)
        if path.endswith("/dataversion/batchGetResolvedUris"):
            return document({"values": self._resolved(request.json().get("values"))})
        if match := re.fullmatch(_RUNS + r"runs/([^/]+)(/details|/children|/serviceinstances/\d+)?", path):
            run = self.runs.find(match[1])
            if request.method == "PATCH" and not match[2]:
                changes = request.json()
                if not isinstance(changes.get("tags") or {}, dict):
                    raise UsageError(f"tags must be an object, not {changes['tags']!r}.")
                run.relabel(changes)
                return document(self._record(run))
            if match[2] == "/children":
                return document({"value": [self._record(child) for child in self.runs.children(run.name)]})
            if (match[2] or "").startswith("/serviceinstances"):
                return document({"instances": _service_instances(run)})
            names = [*run.logs, *([_PROGRESS_LOGS[run.kind]] if run.kind in _PROGRESS_LOGS else [])]
            logs = {name: f"https://{API_HOST}/logs/{quote(run.name)}/{quote(name)}" for name in names}
            return document({**self._record(run), **({"logFiles": logs} if match[2] else {})})
        raise NotFound(f"The local workspace has no {request.method} {path}.")

    def _record(self, run: Run) -> dict[str, Any]:
        status = self.runs.status(run)
        record: dict[str, Any] = {
            "runId": run.name,
            "rootRunId": run.root,
            "parentRunId": run.parent,
            "displayName": run.display_name,
            "experimentId": run.experiment,
            "status": status,
            "createdUtc": run.created.isoformat(),
            "tags": run.body.get("tags") or {},
            "properties": {"azureml.number": str(run.number)} if run.parent else {},
            "outputs": {
                name: {"assetId": f"{_ASSET}/{run.name}/{name}", "type": kind}
                for name, (kind, _) in run.outputs.items()
            },
        }
        if run.started is not None:
            record["startTimeUtc"] = run.started.isoformat()
        if run.ended is not None:
            record["endTimeUtc"] = run.ended.isoformat()
        error = run.error or (self._first_error(run) if status == "Failed" else None)
        if error is not None:
            record["error"] = {"error": {"code": error[0], "message": error[1]}}
        return record

    def _first_error(self, run: Run) -> tuple[str, str]:
        for child in self.runs.commands(run):
            if child.error is not None:
                what = f"The trial {child.display_name}" if run.kind == "Sweep" else f"The step {'.'.join(child.path)}"
                return child.error[0], f"{what} failed. {child.error[1]}"
        return "UserError", "The job failed."

    def _data(self, name: str, sdk: tuple[int, int]) -> Answer:
        record = self._record(self.runs.find(name))
        for output in record["outputs"].values():
            if sdk < _SNAKE_CASE_SINCE:
                output["type"] = _CAMEL_CASE.get(output["type"], output["type"])
        return document({"runMetadata": record})

    def _resolved(self, assets: object) -> dict[str, Any]:
        found = {}
        for asset in assets if isinstance(assets, list) else []:
            if not isinstance(asset, str) or asset.count("/") < _SEPARATORS:
                raise UsageError(f"{asset!r} is not the id of an output. It is of the form {_ASSET}/run/output.")
            _, name, output = asset.split("/", _SEPARATORS)
            run = self.runs.get(name)
            if run is not None and output in run.outputs:
                kind, uri = run.outputs[output]
                found[asset] = {"uri": uri, "type": kind}
        return found

    def _log(self, run: Run, name: str) -> bytes:
        if run.kind == "Command":
            return run.log(name)
        lines = []
        for child in self.runs.commands(run):
            label = child.display_name if run.kind == "Sweep" else ".".join(child.path[len(run.path) :])
            values = "".join(f", {name}={value}" for name, value in child.trial.items())
            if child.started is not None:
                lines.append((child.started, f"{label} ({child.name}{values}) runs"))
            if child.ended is not None and child.status in TERMINAL:
                lines.append((child.ended, f"{label} ({child.name}): {child.status}"))
        return "".join(f"[{when:%Y-%m-%d %H:%M:%SZ}] {text}\n" for when, text in sorted(lines)).encode()


def _service_instances(run: Run) -> dict[str, Any]:
    reason = "The local workspace starts no interactive services."
    return {
        name: {
            "type": service.get("jobServiceType"),
            "port": service.get("port"),
            "status": "Failed",
            "error": {"error": {"code": "UserError", "message": reason}},
            "properties": service.get("properties") or {},
        }
        for name, service in (run.body.get("services") or {}).items()
    }


_FIRST_WITH_LISTS = "2025-01-01-preview"
"""First of the used API versions whose ``JobResourceConfiguration`` has ``dockerArgsList``."""

_EMPTY: dict[str, Any] = dict.fromkeys(("description", "displayName", "componentId", "notificationSetting"))
_EMPTY_OF_COMMAND: dict[str, Any] = {
    **dict.fromkeys(("codeId", "identity", "distribution", "limits", "queueSettings", "autologgerSettings")),
    "parameters": {},
}
_RESOURCES: dict[str, Any] = {
    **dict.fromkeys(("instanceType", "properties", "dockerArgs")),
    "instanceCount": 1,
    "shmSize": "2g",
}
_EMPTY_OF_SERVICE: dict[str, Any] = dict.fromkeys(("port", "status", "errorMessage", "properties", "nodes"))
_EMPTY_OF_OUTPUT: dict[str, Any] = {
    **dict.fromkeys(("description", "assetName", "assetVersion")),
    "mode": "ReadWriteMount",
}


def job_properties(run: Run, status: Status, *, workspace: str, version: str) -> dict[str, Any]:
    """Return the properties of a job's document in a response.

    Args:
        version: API version of the request; fields that are younger are left out.
    """
    single = run.kind == "Command"
    found = {**_EMPTY, **(_EMPTY_OF_COMMAND if single else {}), **run.body}
    if single:
        found["resources"] = {**_RESOURCES, **(found.get("resources") or {})}
        # Versions are dates, which compare as texts.
        if version < _FIRST_WITH_LISTS:
            found["resources"].pop("dockerArgsList", None)
    return {
        **found,
        "status": status,
        "isArchived": bool(run.body.get("isArchived")),
        "properties": {**(run.body.get("properties") or {}), **_own_properties(run)},
        "outputs": _outputs(run),
        "services": _services(run, workspace),
    }


def _own_properties(run: Run) -> dict[str, str]:
    """Return what clients read of the properties that the service adds to a job's, with one more of each kind."""
    if run.kind == "Command":
        snapshot = uuid.uuid5(uuid.NAMESPACE_URL, str(run.body.get("codeId") or run.name))
        return {"_azureml.ComputeTargetType": "amlctrain", "ContentSnapshotId": str(snapshot)}
    if run.kind == "Pipeline":
        return {"azureml.runsource": "azureml.PipelineRun", "runType": "HTTP"}
    best = {} if run.best is None else {"best_child_run_id": run.best[0], "score": str(run.best[1])}
    return {"azureml.runsource": "hyperdrive", **best}


def _outputs(run: Run) -> dict[str, Any]:
    given = run.body.get("outputs") or {}
    named = {
        name: {**_EMPTY_OF_OUTPUT, **(given.get(name) or {})} | {"uri": uri, "jobOutputType": kind}
        for name, (kind, uri) in run.outputs.items()
    }
    if run.kind != "Command":
        return named
    default = {
        **_EMPTY_OF_OUTPUT,
        "uri": f"azureml://datastores/workspaceartifactstore/ExperimentRun/dcid.{run.name}",
        "jobOutputType": "uri_folder",
    }
    return {"default": default, **named}


def _services(run: Run, workspace: str) -> dict[str, Any]:
    given = {
        name: {**_EMPTY_OF_SERVICE, **service, "endpoint": None, "status": "NotStarted"}
        for name, service in (run.body.get("services") or {}).items()
    }
    # With a query, as in Azure ML: azure-ai-ml appends another part to it.
    studio = f"https://{API_HOST}/runs/{run.name}?wsid={workspace}"
    own = {"Tracking": f"azureml://{API_HOST}/mlflow/v1.0", "Studio": studio}
    return {
        **given,
        **{
            kind: {**_EMPTY_OF_SERVICE, "jobServiceType": kind, "endpoint": address, "status": None}
            for kind, address in own.items()
        },
    }
