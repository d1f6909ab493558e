"""The resource manager of a local workspace: computes, datastores and jobs, beside assets and schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.api.assets import Assets, is_listed
from azureml_elastic.testing.api.history import API_HOST
from azureml_elastic.testing.api.job_document import job_properties
from azureml_elastic.testing.api.limits import check_limits
from azureml_elastic.testing.api.schedules import Schedules
from azureml_elastic.testing.jobs.machines import Pool
from azureml_elastic.testing.jobs.runs import Run, Runs
from azureml_elastic.testing.messages import (
    Answer,
    MalformedRequest,
    Request,
    document,
    properties_of,
    refusal,
    unsupported,
)
from azureml_elastic.testing.storage.account import StorageAccount
from azureml_elastic.testing.storage.locations import DATASTORES

__all__ = ["ARM_HOST", "Resources"]

ARM_HOST = "management.azure.com"

_LOCATION = "westeurope"
_WORKSPACES = "Microsoft.MachineLearningServices/workspaces"
_JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_WHAT_RUNS = ("jobType", "command", "codeId", "environmentId", "jobs", "trial", "searchSpace")
"""Fields of a job that cannot be changed once it is submitted."""


@dataclass
class Resources:
    """Handler of requests to the resource manager; stores the entities that were put."""

    root: str
    """Resource id of the workspace."""
    storage: StorageAccount
    runs: Runs
    pools: Mapping[str, Pool]
    assets: Assets
    schedules: Schedules
    submit: Callable[[str, dict[str, Any]], None]
    """Function that starts a job, given its name and properties; raises ``UsageError`` for unsupported jobs."""

    def properties(self, resource: str) -> dict[str, Any] | None:
        """Return the properties of the asset with this id, ``None`` if there is none."""
        return self.assets.properties(self._relative(resource.removeprefix("azureml:")) or "")

    def answer(self, request: Request) -> Answer:
        """Return the response to a request."""
        rest = self._relative(request.path)
        if rest is None and request.path == self._account:
            return document(self._storage_document())
        if rest is None:
            return refusal(
                404, "ResourceNotFound", f"There is nothing here but the local workspace {self.root}: {request.path}"
            )
        kind = rest.strip("/").partition("/")[0]
        handler = {
            "": self._workspace,
            "computes": self._compute,
            "datastores": self._datastore,
            "jobs": self._job,
            "schedules": self.schedules.answer,
        }.get(kind, self.assets.answer)
        return handler(request, rest)

    def _relative(self, path: str) -> str | None:
        if path.lower() == self.root.lower() or path.lower().startswith(f"{self.root.lower()}/"):
            return path[len(self.root) :]
        return None

    @property
    def _account(self) -> str:
        """Resource id of the storage account."""
        scope = self.root.partition("/providers/")[0]
        return f"{scope}/providers/Microsoft.Storage/storageAccounts/{self.storage.account}"

    def _storage_document(self) -> dict[str, Any]:
        return {
            "id": self._account,
            "name": self.storage.account,
            "kind": "StorageV2",
            "location": _LOCATION,
            "properties": {
                "primaryEndpoints": {
                    "blob": f"https://{self.storage.blob_host}/",
                    "table": f"https://{self.storage.table_host}/",
                },
                "publicNetworkAccess": "Enabled",
            },
        }

    def _workspace(self, request: Request, rest: str) -> Answer:
        del request, rest
        return document(
            {
                "id": self.root,
                "name": self.root.rpartition("/")[2],
                "location": _LOCATION,
                "type": _WORKSPACES,
                "identity": {"type": "SystemAssigned"},
                "properties": {
                    "workspaceId": "00000000-0000-0000-0000-0000000000bb",
                    "discoveryUrl": f"https://{API_HOST}/discovery",
                    "storageAccount": self._account,
                },
            }
        )

    def _compute(self, request: Request, rest: str) -> Answer:
        name = rest.removeprefix("/computes").strip("/")
        if not name:
            return document({"value": [self._compute_document(name) for name in self.pools]})
        if name not in self.pools:
            there = ", ".join(sorted(self.pools))
            return refusal(
                404,
                "NotFound",
                f"The local workspace has no compute {name!r}, only {there}. Give it one by "
                f"pools=, or 'azureml-elastic workspace start --pool {name}=8'.",
            )
        if request.method != "GET":
            return unsupported(request)
        return document(self._compute_document(name))

    def _compute_document(self, name: str) -> dict[str, Any]:
        pool = self.pools[name]
        properties = {
            "computeType": "AmlCompute",
            "provisioningState": "Succeeded",
            "properties": {
                "vmSize": pool.size,
                "vmPriority": "LowPriority" if pool.tier == "low_priority" else "Dedicated",
                "scaleSettings": {"maxNodeCount": pool.nodes, "minNodeCount": 0},
            },
        }
        return self._resource("computes", name, properties, location=_LOCATION)

    def _datastore(self, request: Request, rest: str) -> Answer:
        parts = rest.strip("/").split("/")[1:]
        if not parts:
            found = [self._datastore_document(name) for name in DATASTORES]
            default = request.query.get("isDefault") == ["true"]
            return document({"value": found[:1] if default else found})
        if parts[0] not in DATASTORES:
            return refusal(404, "NotFound", f"The local workspace has no datastore {parts[0]!r}.")
        if parts[1:] == ["listSecrets"]:
            if request.body and request.json().get("expirableSecret"):
                return document({"secretsType": "Sas", "sasToken": self.storage.blob_signature})
            return document({"secretsType": "AccountKey", "key": self.storage.key})
        return document(self._datastore_document(parts[0])) if request.method == "GET" else unsupported(request)

    def _datastore_document(self, name: str) -> dict[str, Any]:
        properties = {
            "datastoreType": "AzureBlob",
            "accountName": self.storage.account,
            "containerName": DATASTORES[name],
            "endpoint": "core.windows.net",
            "protocol": "https",
            "isDefault": name == next(iter(DATASTORES)),
            "credentials": {"credentialsType": "AccountKey"},
        }
        return self._resource("datastores", name, properties)

    def _job(self, request: Request, rest: str) -> Answer:
        name, _, action = rest.removeprefix("/jobs").strip("/").partition("/")
        if not name:
            return self._list_jobs(request)
        version = (request.query.get("api-version") or [""])[0]
        if request.method == "PUT" and not action:
            return self._submitted(name, request.json(), version)
        run = self.runs.get(name)
        if run is None:
            return refusal(404, "NotFound", f"The local workspace has no job {name!r}.")
        if request.method == "POST" and action == "cancel":
            self.runs.cancel(run)
            return Answer(200)
        found = request.method == "GET" and not action
        return document(self._job_document(run, version)) if found else unsupported(request)

    def _list_jobs(self, request: Request) -> Answer:
        wanted = {key: values[-1] for key, values in request.query.items()}
        found = [
            run
            for run in self.runs.all()
            if is_listed(request, run.body.get("isArchived"))
            and wanted.get("scheduleId") in (None, run.schedule)
            and wanted.get("jobType") in (None, run.kind)
            and wanted.get("tag") in (None, *(run.body.get("tags") or {}))
            and wanted.get("scheduled") in (None, str(run.schedule is not None).lower())
        ]
        return document({"value": [self._job_document(run) for run in found]})

    def _submitted(self, name: str, body: dict[str, Any], version: str) -> Answer:
        known = self.runs.get(name)
        if known is not None:
            return self._updated(known, properties_of(body), version)
        if not _JOB_NAME.fullmatch(name):
            raise MalformedRequest(
                f"{name!r} is not the name of a job. Use letters, digits, '-', '_' and '.', and at most 255 of them."
            )
        try:
            check_limits(properties_of(body))
            self.submit(name, properties_of(body))
        except UsageError as error:
            return refusal(400, "UserError", str(error))
        run = self.runs.get(name)
        assert run is not None
        return document(self._job_document(run, version), 201)

    def _updated(self, run: Run, properties: dict[str, Any], version: str) -> Answer:
        """Archive a job, restore it or change its labels, given its whole document as clients send it."""
        held = self._job_document(run, version)["properties"]
        changed = [each for each in _WHAT_RUNS if properties.get(each) not in (None, held.get(each))]
        if changed:
            text = f"The local workspace has a job {run.name!r} already, with another {changed[0]!r}."
            return refusal(409, "Conflict", f"{text} Submit under a new name.")
        run.relabel({**properties, "hidden": properties.get("isArchived")})
        return document(self._job_document(run, version))

    def _job_document(self, run: Run, version: str = "") -> dict[str, Any]:
        properties = job_properties(run, self.runs.status(run), host=API_HOST, workspace=self.root, version=version)
        created = {"createdAt": run.created.isoformat(), "createdBy": "local"}
        return self._resource("jobs", run.name, properties, systemData=created)

    def _resource(self, kind: str, name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "id": f"{self.root}/{kind}/{name}",
            "name": name,
            "type": f"{_WORKSPACES}/{kind}",
            "properties": properties,
            **more,
        }
