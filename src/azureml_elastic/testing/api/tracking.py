"""The part of MLflow's tracking API by which scripts log: parameters, metrics and tags of the workspace's jobs.

Every job and every step is an MLflow run of its own, which exists before its script starts. As with azureml-mlflow, a
script that ends its run does not change the job's status. Source: MLflow's REST API, version 2.0.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.runs import TERMINAL, Run, Runs
from azureml_elastic.testing.messages import Answer, Request, document

TRACKING_PATH = "/mlflow/v1.0"
"""Path of the tracking API on the workspace's data plane, followed by the workspace id."""

_CALL = re.compile(r".*/api/2\.0/mlflow/(.+)")
_SINGLE = {"runs/log-metric": "metrics", "runs/log-parameter": "params", "runs/set-tag": "tags"}
"""Calls that log one entry of a batch, with its field there."""

_ACTIVE = "RUNNING"
_STATUSES = {"Completed": "FINISHED", "Failed": "FAILED", "Canceled": "KILLED"}


@dataclass
class Logged:
    """What was logged to a run: texts by name, and for each metric its steps and values in the order of logging."""

    parameters: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


class Tracking:
    """Handler of requests to the tracking API; thread-safe."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._logged: dict[str, Logged] = {}
        self._history: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def logged(self, name: str) -> Logged:
        """Return what was logged to a run so far."""
        with self._lock:
            found = self._logged.get(name, Logged())
            metrics = {metric: list(values) for metric, values in found.metrics.items()}
            return Logged(dict(found.parameters), dict(found.tags), metrics)

    def answer(self, request: Request) -> Answer:
        """Return the response to a request."""
        match = _CALL.fullmatch(request.path)
        call = "" if match is None else match[1]
        fields = request.query | request.json()
        if call in ("experiments/get", "experiments/get-by-name"):
            name = str(fields.get("experiment_id" if call.endswith("get") else "experiment_name"))
            held = {"experiment_id": name, "name": name, "artifact_location": "", "lifecycle_stage": "active"}
            return document({"experiment": held})
        run = self._runs.get(str(fields.get("run_id") or fields.get("run_uuid")))
        if run is None and call.startswith(("runs/", "metrics/")):
            return _refusal(404, "RESOURCE_DOES_NOT_EXIST", f"The local workspace has no run {fields.get('run_id')!r}.")
        if run is not None:
            if call == "runs/get":
                return document({"run": {"info": self._info(run), "data": self._data(run.name)}})
            if call == "runs/update":
                return document({"run_info": self._info(run)})
            if call == "metrics/get-history":
                with self._lock:
                    return document({"metrics": self._history.get((run.name, str(fields.get("metric_key"))), [])})
            if call == "runs/log-batch" or call in _SINGLE:
                return self._log(run.name, {_SINGLE[call]: [fields]} if call in _SINGLE else fields)
        return _refusal(
            404, "ENDPOINT_NOT_FOUND", f"The local workspace has no {request.method} {request.path} of MLflow."
        )

    def _log(self, name: str, batch: Mapping[str, Any]) -> Answer:
        try:
            parameters = {str(each["key"]): str(each["value"]) for each in batch.get("params") or ()}
            tags = {str(each["key"]): str(each["value"]) for each in batch.get("tags") or ()}
            metrics = [
                (str(each["key"]), int(each.get("step") or 0), float(each["value"]), int(each.get("timestamp") or 0))
                for each in batch.get("metrics") or ()
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"The request logs no parameters, tags or metrics: {error!r}.") from error
        with self._lock:
            logged = self._logged.setdefault(name, Logged())
            # Before anything is changed: a batch that is refused logs nothing.
            for key, value in parameters.items():
                held = logged.parameters.get(key, value)
                if held != value:
                    text = f"The parameter {key!r} of the run {name!r} is {held!r} and cannot be changed."
                    return _refusal(400, "INVALID_PARAMETER_VALUE", text)
            logged.parameters.update(parameters)
            logged.tags.update(tags)
            for metric, step, number, time in metrics:
                logged.metrics.setdefault(metric, []).append((step, number))
                each = {"key": metric, "step": step, "value": number, "timestamp": time}
                self._history.setdefault((name, metric), []).append(each)
        return document({})

    def _data(self, name: str) -> dict[str, Any]:
        logged = self.logged(name)
        return {
            "params": [{"key": key, "value": value} for key, value in logged.parameters.items()],
            "tags": [{"key": key, "value": value} for key, value in logged.tags.items()],
            "metrics": [self._history[name, key][-1] for key in logged.metrics],
        }

    def _info(self, run: Run) -> dict[str, Any]:
        status = self._runs.status(run)
        info = {
            "run_id": run.name,
            "run_uuid": run.name,
            "run_name": run.display_name,
            "experiment_id": run.experiment,
            "status": _STATUSES[status] if status in TERMINAL else _ACTIVE,
            "start_time": _milliseconds(run.created),
            "artifact_uri": "",
            "lifecycle_stage": "active",
        }
        return info if run.ended is None else {**info, "end_time": _milliseconds(run.ended)}


def _milliseconds(time: Any) -> int:
    return int(time.timestamp() * 1000)


def _refusal(status: int, code: str, message: str) -> Answer:
    return document({"error_code": code, "message": message}, status)
