"""Schedules of a local workspace, which submit their jobs when they are triggered by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.api.limits import check_limits
from azureml_elastic.testing.messages import Answer, Request, document, properties_of, refusal, unsupported

__all__ = ["Schedules"]

_VIEWS = {"EnabledOnly": (True,), "DisabledOnly": (False,), "All": (True, False)}
_POLL_MS = "20"
"""Time after which a client asks whether a schedule is there."""
_TRIGGERS = ("Cron", "Recurrence")


@dataclass
class Schedules:
    """Handler of requests for schedules.

    Args:
        root: resource id of the workspace.
        check: function that raises ``UsageError`` for properties of a job that could not be submitted.
        submit: function that submits a job, given its name, its properties and the name of the schedule.
        job: function that returns the properties of a submitted job by its id, ``None`` if there is none.
    """

    root: str
    check: Callable[[dict[str, Any]], None]
    submit: Callable[[str, dict[str, Any], str], None]
    job: Callable[[str], dict[str, Any] | None]
    _schedules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Properties by name."""
    _triggered: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: Request, path: str) -> Answer:
        """Return the response to a request for a path below the workspace."""
        name, _, action = path.removeprefix("/schedules").strip("/").partition("/")
        with self._lock:
            schedules = dict(self._schedules)
        if not name:
            states = _VIEWS.get((request.query.get("listViewType") or ["EnabledOnly"])[0], (True,))
            listed = [name for name, held in schedules.items() if held["isEnabled"] in states]
            return document({"value": [self._document(name, schedules[name]) for name in listed]})
        if request.method == "PUT" and not action:
            return self._put(name, properties_of(request.json()), new=name not in schedules)
        if name not in schedules:
            return refusal(404, "NotFound", f"The local workspace has no schedule {name!r}.")
        if request.method == "GET" and not action:
            return document(self._document(name, schedules[name]))
        if request.method == "DELETE" and not action:
            return self._delete(name, enabled=schedules[name]["isEnabled"])
        if request.method == "POST" and action == "trigger":
            return self._trigger(name, schedules[name])
        return unsupported(request)

    def _put(self, name: str, properties: dict[str, Any], *, new: bool) -> Answer:
        kind = (properties.get("trigger") or {}).get("triggerType")
        if kind not in _TRIGGERS:
            text = f"The schedule's trigger is of type {kind!r}. Give one of {', '.join(_TRIGGERS)}."
            return refusal(400, "UserError", text)
        try:
            held = {**properties, "action": self._action(properties.get("action") or {})}
        except UsageError as error:
            return refusal(400, "UserError", str(error))
        held["isEnabled"] = properties.get("isEnabled") is not False
        held["provisioningState"] = "Succeeded"
        with self._lock:
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
            found = self.job(str(source))
            if found is None:
                raise UsageError(f"The schedule's job {source!r} is not in the local workspace. Submit it first.")
            job = {**found, "sourceJobId": source, "isArchived": False}
        check_limits(job)
        self.check(job)
        return {**action, "jobDefinition": job}

    def _delete(self, name: str, *, enabled: bool) -> Answer:
        if enabled:
            text = f"The schedule {name!r} is enabled. Disable it first: ml_client.schedules.begin_disable({name!r})."
            return refusal(400, "UserError", text)
        with self._lock:
            self._schedules.pop(name, None)
        return Answer(200)

    def _trigger(self, name: str, held: dict[str, Any]) -> Answer:
        if not held["isEnabled"]:
            text = f"The schedule {name!r} is disabled. Enable it first: ml_client.schedules.begin_enable({name!r})."
            return refusal(400, "UserError", text)
        with self._lock:
            self._triggered += 1
            number = self._triggered
        job = f"{name}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{number}"
        try:
            self.submit(job, dict(held["action"]["jobDefinition"]), name)
        except UsageError as error:  # such as for want of a compute that there was when the schedule was made
            return refusal(400, "UserError", str(error))
        return document({"scheduleActionType": "CreateJob", "submissionId": job})

    def _document(self, name: str, properties: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"{self.root}/schedules/{name}",
            "name": name,
            "type": "Microsoft.MachineLearningServices/workspaces/schedules",
            "properties": properties,
            "systemData": {"createdBy": "local"},
        }
