"""The resource manager of a local workspace: computes, datastores and jobs, beside assets and schedules.

What Azure ML refuses in the document of a submitted job, whatever runs it, is refused here: the sizes are those of the
page "Service limits in Azure Machine Learning", the forms those that the models of the API in azure-ai-ml describe
(``JobBaseProperties``, ``JobResourceConfiguration``, ``QueueSettings``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.api.assets import WORKSPACES, Assets, entity, is_listed
from azureml_elastic.testing.api.history import API_HOST, job_properties
from azureml_elastic.testing.jobs.machines import Pool
from azureml_elastic.testing.jobs.runs import Run, Runs
from azureml_elastic.testing.jobs.service import Service
from azureml_elastic.testing.messages import (
    Answer,
    NotFound,
    Request,
    document,
    either,
    properties_of,
    refusal,
    unsupported,
)
from azureml_elastic.testing.storage import DATASTORES, StorageAccount

_LONGEST_TEXTS = {"displayName": 256, "experimentName": 256, "description": 5000}
_MOST_ENTRIES = 50
_LONGEST_KEY = 100
_LONGEST_VALUE = 1000
_FORMS = (
    (
        ("computeId",),
        r"(?:/subscriptions/[^/]+/resourceGroups/[^/]+/providers/[^/]+/workspaces/[^/]+/computes/[^/]+)?",
        "is not the id of a compute, /subscriptions/.../computes/<name>",
    ),
    (("resources", "shmSize"), r"0*[1-9]\d*[bkmgBKMG]", "is not a number above 0 and one of the units b, k, m and g"),
    (
        ("queueSettings", "jobTier"),
        "Null|Spot|Basic|Standard|Premium",
        "is none of Null, Spot, Basic, Standard, Premium",
    ),
)
"""Fields of jobs and steps, what matches their values, and what is said of others."""


def check_limits(properties: Mapping[str, Any]) -> None:
    """Check the properties of a job's document.

    Raises:
        UsageError: a text, a number of entries, a size, a tier or the id of a compute is none that Azure ML takes.
    """
    for name, longest in _LONGEST_TEXTS.items():
        if len(str(properties.get(name) or "")) > longest:
            raise UsageError(f"{name} has {len(str(properties[name]))} characters, above the limit of {longest}.")
    for name in ("tags", "properties"):
        _check_entries(name, properties.get(name))
    steps = properties.get("jobs")
    for job in (properties, *(steps.values() if isinstance(steps, Mapping) else ())):
        for path, form, wrong in _FORMS:
            value: Any = job
            for name in path:
                value = either(value, name) if isinstance(value, Mapping) else None
            if value is not None and not re.fullmatch(form, str(value), re.ASCII):
                raise UsageError(f"{path[-1]}={value!r:.200} {wrong}.")


def _check_entries(field: str, entries: object) -> None:
    if not isinstance(entries, Mapping):
        return
    if len(entries) > _MOST_ENTRIES:
        raise UsageError(f"The job has {len(entries)} {field}, above the limit of {_MOST_ENTRIES}.")
    for name, value in entries.items():
        if len(name) > _LONGEST_KEY or len(str(value)) > _LONGEST_VALUE:
            raise UsageError(
                f"{name!r:.120} of the job's {field} has {len(name)} characters and its value {len(str(value))}; the "
                f"limits are {_LONGEST_KEY} and {_LONGEST_VALUE}."
            )


_VIEWS = {"EnabledOnly": (True,), "DisabledOnly": (False,), "All": (True, False)}
_POLL_MS = "20"
"""Time after which a client asks whether a schedule is there."""


@dataclass
class Schedules:
    """Handler of requests for schedules."""

    root: str
    service: Service
    runs: Runs
    _schedules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Properties by name; each is replaced as a whole, so that no lock is needed."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def answer(self, request: Request, path: str) -> Answer:
        """Return the response to a request for a path below the workspace."""
        name, _, action = path.removeprefix("/schedules").strip("/").partition("/")
        if not name:
            states = _VIEWS.get(request.query.get("listViewType", ""), (True,))
            listed = [item for item in self._schedules.copy().items() if item[1]["isEnabled"] in states]
            return document({"value": [self._document(*item) for item in listed]})
        held = self._schedules.get(name)
        if request.method == "PUT" and not action:
            return self._put(name, properties_of(request.json()), new=held is None)
        if held is None:
            raise NotFound(f"The local workspace has no schedule {name!r}.")
        match request.method, action:
            case "GET", "":
                return document(self._document(name, held))
            case "DELETE", "":
                if held["isEnabled"]:
                    advice = f"Disable it first: ml_client.schedules.begin_disable({name!r})."
                    raise UsageError(f"The schedule {name!r} is enabled. {advice}")
                self._schedules.pop(name, None)
                return Answer(200)
            case "POST", "trigger":
                return self._trigger(name, held)
        return unsupported(request)

    def _put(self, name: str, properties: dict[str, Any], *, new: bool) -> Answer:
        kind = (properties.get("trigger") or {}).get("triggerType")
        if kind not in ("Cron", "Recurrence"):
            raise UsageError(f"The schedule's trigger is of type {kind!r}. Give one of Cron, Recurrence.")
        held = {
            **properties,
            "action": self._action(properties.get("action") or {}),
            "isEnabled": properties.get("isEnabled") is not False,
            "provisioningState": "Succeeded",
        }
        self._schedules[name] = held
        # azure-ai-ml before 1.35 reads one response only once, so that the end must be in that to another request.
        going_on = self._document(name, {**held, "provisioningState": "Creating" if new else "Updating"})
        answer = document(going_on, 201 if new else 200)
        return replace(answer, headers=(*answer.headers, ("retry-after-ms", _POLL_MS)))

    def _action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Return the action with the job that it submits, which is checked as if it were submitted now."""
        if action.get("actionType") != "CreateJob":
            raise UsageError(
                f"The local workspace has schedules of jobs, not of {action.get('actionType')!r}. Give create_job=."
            )
        job = dict(action.get("jobDefinition") or {})
        source = job.get("sourceJobId")
        if source and not job.get("jobs"):
            found = self.runs.get(str(source).rpartition("/")[2])
            if found is None:
                raise UsageError(f"The schedule's job {source!r} is not in the local workspace. Submit it first.")
            job = {**found.body, "sourceJobId": source, "isArchived": False}
        check_limits(job)
        self.service.check(job)
        return {**action, "jobDefinition": job}

    def _trigger(self, name: str, held: dict[str, Any]) -> Answer:
        if not held["isEnabled"]:
            raise UsageError(
                f"The schedule {name!r} is disabled. Enable it first: ml_client.schedules.begin_enable({name!r})."
            )
        # With the number, as a schedule may be triggered twice in a second.
        job = f"{name}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{next(self._numbers)}"
        self.service.submit(job, dict(held["action"]["jobDefinition"]), name)
        return document({"scheduleActionType": "CreateJob", "submissionId": job})

    def _document(self, name: str, properties: dict[str, Any]) -> dict[str, Any]:
        return entity(self.root, f"schedules/{name}", properties)


ARM_HOST = "management.azure.com"

_LOCATION = "westeurope"
_KEYS_SINCE = (1, 33)
"""First release of azure-ai-ml that takes the key of a datastore for its signature."""

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
    service: Service

    def __post_init__(self) -> None:
        self._schedules = Schedules(self.root, self.service, self.runs)
        self._account = f"{self.root.partition('/providers/')[0]}/providers/Microsoft.Storage/storageAccounts/"
        self._account += self.storage.account

    def answer(self, request: Request) -> Answer:
        """Return the response to a request."""
        rest = self.assets.relative(request.path)
        if rest is None and request.path == self._account:
            return document(self._storage_document())
        if rest is None:
            raise NotFound(f"There is nothing here but the local workspace {self.root}: {request.path}")
        handler = {
            "": self._workspace,
            "computes": self._compute,
            "datastores": self._datastore,
            "jobs": self._job,
            "schedules": self._schedules.answer,
        }.get(rest.strip("/").partition("/")[0], self.assets.answer)
        return handler(request, rest)

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

    def _workspace(self, _request: Request, _rest: str) -> Answer:
        return document(
            {
                "id": self.root,
                "name": self.root.rpartition("/")[2],
                "location": _LOCATION,
                "type": WORKSPACES,
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
            raise NotFound(
                f"The local workspace has no compute {name!r}, only {', '.join(sorted(self.pools))}. Give it one by "
                f"pools=, or 'azureml-elastic workspace start --pool {name}=8'."
            )
        return document(self._compute_document(name)) if request.method == "GET" else unsupported(request)

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
        return entity(self.root, f"computes/{name}", properties, location=_LOCATION)

    def _datastore(self, request: Request, rest: str) -> Answer:
        parts = rest.strip("/").split("/")[1:]
        if not parts:
            found = [self._datastore_document(name) for name in DATASTORES]
            default = request.query.get("isDefault") == "true"
            return document({"value": found[:1] if default else found})
        if parts[0] not in DATASTORES:
            raise NotFound(f"The local workspace has no datastore {parts[0]!r}.")
        if parts[1:] == ["listSecrets"]:
            # Of a signature azure-ai-ml makes a key when it streams the log of a command job; releases that know no key
            # of a datastore do not.
            if request.sdk < _KEYS_SINCE:
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
        return entity(self.root, f"datastores/{name}", properties)

    def _job(self, request: Request, rest: str) -> Answer:
        name, _, action = rest.removeprefix("/jobs").strip("/").partition("/")
        if not name:
            return self._list_jobs(request)
        version = request.query.get("api-version", "")
        if request.method == "PUT" and not action:
            return self._submitted(name, request.json(), version)
        run = self.runs.find(name)
        if request.method == "POST" and action == "cancel":
            self.runs.cancel(run)
            return Answer(200)
        found = request.method == "GET" and not action
        return document(self._job_document(run, version)) if found else unsupported(request)

    def _list_jobs(self, request: Request) -> Answer:
        wanted = request.query
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
        properties = properties_of(body)
        if known := self.runs.get(name):
            return self._updated(known, properties, version)
        if not _JOB_NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not the name of a job. Use letters, digits, '-', '_' and '.', and at most 255 of them."
            )
        check_limits(properties)
        self.service.submit(name, properties)
        return document(self._job_document(self.runs.find(name), version), 201)

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
        properties = job_properties(run, self.runs.status(run), workspace=self.root, version=version)
        created = {"createdAt": run.created.isoformat(), "createdBy": "local"}
        return entity(self.root, f"jobs/{run.name}", properties, systemData=created)
