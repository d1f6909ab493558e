"""What Azure ML returns for a submitted job: its document, with the additions of the service.

The additions are those in the responses to azure-ai-ml's own tests, which Microsoft publishes as
``sdk/ml/azure-ai-ml/tests/recordings`` in Azure/azure-sdk-for-python, and those in the documentation of a run's
properties ("Git integration for Azure Machine Learning"). The default size of ``/dev/shm`` is one of them. The
properties of pipelines are assumed.
"""

from __future__ import annotations

import uuid
from typing import Any

from azureml_elastic.testing.jobs.runs import Run
from azureml_elastic.testing.jobs.verdicts import Status

__all__ = ["job_properties"]

_FIRST_WITH_LISTS = "2025-01-01-preview"
"""First of the used API versions whose ``JobResourceConfiguration`` has ``dockerArgsList``."""

_EMPTY: dict[str, Any] = dict.fromkeys(("description", "displayName", "componentId", "notificationSetting"))
_EMPTY_OF_COMMAND: dict[str, Any] = {
    **dict.fromkeys(("codeId", "identity", "distribution", "limits", "queueSettings", "autologgerSettings")),
    "parameters": {},
}
_RESOURCES: dict[str, Any] = {
    "instanceCount": 1,
    "instanceType": None,
    "properties": None,
    "shmSize": "2g",
    "dockerArgs": None,
}
_EMPTY_OF_SERVICE: dict[str, Any] = dict.fromkeys(("port", "status", "errorMessage", "properties", "nodes"))
_EMPTY_OF_OUTPUT: dict[str, Any] = {
    **dict.fromkeys(("description", "assetName", "assetVersion")),
    "mode": "ReadWriteMount",
}


def job_properties(run: Run, status: Status, *, host: str, workspace: str, version: str) -> dict[str, Any]:
    """Return the properties of a job's document in a response.

    Args:
        run: the job.
        status: its state.
        host: host name of the services of the run.
        workspace: resource id of the workspace.
        version: API version of the request; fields that are younger are left out.
    """
    single = run.kind == "Command"
    found = {**_EMPTY, **(_EMPTY_OF_COMMAND if single else {}), **run.body}
    if single:
        found["resources"] = {**_RESOURCES, **(found.get("resources") or {})}
        if version < _FIRST_WITH_LISTS:
            found["resources"].pop("dockerArgsList", None)
    return {
        **found,
        "status": status,
        "isArchived": bool(run.body.get("isArchived")),
        "properties": {**(run.body.get("properties") or {}), **_OWN_PROPERTIES[run.kind](run)},
        "outputs": _outputs(run),
        "services": _services(run, host, workspace),
    }


def _of_command(run: Run) -> dict[str, str]:
    return {
        "_azureml.ComputeTargetType": "amlctrain",
        "ContentSnapshotId": str(uuid.uuid5(uuid.NAMESPACE_URL, str(run.body.get("codeId") or run.name))),
        "ProcessInfoFile": "azureml-logs/process_info.json",
        "ProcessStatusFile": "azureml-logs/process_status.json",
    }


def _of_pipeline(run: Run) -> dict[str, str]:
    return {
        "azureml.DevPlatv2": "true",
        "azureml.runsource": "azureml.PipelineRun",
        "azureml.continue_on_step_failure": str(run.continues_on_failure),
        "azureml.parameters": "{}",
        "azureml.pipelineComponent": "pipelinerun",
        "runSource": "MFE",
        "runType": "HTTP",
    }


def _of_sweep(run: Run) -> dict[str, str]:
    own = {"resume_child_runs": "null", "azureml.runsource": "hyperdrive", "runTemplate": "HyperDrive"}
    if run.best is None:
        return own
    return {**own, "best_child_run_id": run.best[0], "score": str(run.best[1]), "best_metric_status": "Succeeded"}


_OWN_PROPERTIES = {"Command": _of_command, "Pipeline": _of_pipeline, "Sweep": _of_sweep}


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


def _services(run: Run, host: str, workspace: str) -> dict[str, Any]:
    """Return the services of the run, with the fields of their state, and those of the service itself."""
    given = {
        name: {**_EMPTY_OF_SERVICE, **service, "endpoint": None, "status": "NotStarted"}
        for name, service in (run.body.get("services") or {}).items()
    }
    # With a query, as in Azure ML: azure-ai-ml appends another part to it.
    studio = f"https://{host}/runs/{run.name}?wsid={workspace}"
    own = {"Tracking": f"azureml://{host}/mlflow/v1.0", "Studio": studio}
    return {
        **given,
        **{
            kind: {**_EMPTY_OF_SERVICE, "jobServiceType": kind, "endpoint": address, "status": None}
            for kind, address in own.items()
        },
    }
