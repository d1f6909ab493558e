"""The jobs of a workspace, read with the user's login and without azure-ai-ml, whose import takes two seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from azureml_elastic.cli.workspaces import WorkspaceName
from azureml_elastic.config.resources import SERVERLESS
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.ledger.bill import Tier
from azureml_elastic.node.replacement.jobs import WorkspaceJobs, developer_jobs
from azureml_elastic.submit.run import ElasticRun, JobRecord, NodeOfRun


@dataclass(frozen=True)
class Machine:
    """Machine of a node.

    Args:
        size: VM size, ``None`` if it is unknown, as on serverless compute without an instance type.
        price_per_hour: price that the job gives for its pool, in USD.
    """

    pool: str
    size: str | None
    tier: Tier | None
    price_per_hour: float | None = None


class Jobs:
    """Reader of a workspace's jobs, of their logs and of the machines that they run on.

    All methods raise ``WorkspaceForbidden`` if the login lacks a role, and ``WorkspaceUnavailable`` if a service does
    not respond.
    """

    def __init__(self, service: WorkspaceJobs) -> None:
        self.service = service
        self._machines: dict[str, Machine] = {}

    def job(self, name: str) -> JobRecord | None:
        """Return a job, ``None`` if there is none of this name."""
        document = self.service.document(name)
        return None if document is None else _record(name, document)

    def steps(self, name: str) -> Sequence[JobRecord]:
        """Return the steps of a pipeline that exist by now."""
        found = self.service.children(name) or ()
        return [JobRecord(step.name, step.status, display_name=step.display_name) for step in found]

    def times(self, name: str) -> tuple[datetime | None, datetime | None]:
        """Return when a job began and ended to run, ``None`` for what has not happened."""
        record = self.service.record(name)
        return (None, None) if record is None else (record.started, record.ended)

    def status(self, name: str) -> str | None:
        """Return the status of a job or a step, ``None`` if there is none of this name."""
        record = self.service.record(name)
        return None if record is None else record.status

    def container_url(self, datastore: str) -> str | None:
        """Return the URL of a datastore's container for fsspec; ``None`` if it is none of blobs or does not exist."""
        found = self.service.datastore(datastore) or {}
        if found.get("datastoreType") not in ("AzureBlob", "AzureDataLakeGen2"):
            return None
        container = found.get("containerName") or found.get("filesystem")
        return f"abfs://{container}@{found['accountName']}.dfs.{found.get('endpoint') or 'core.windows.net'}"

    def machine(self, run: ElasticRun, node: NodeOfRun) -> Machine:
        """Return the machine of a node as its pool and its compute describe it."""
        pool = next((each for each in run.plan.pools if each.compute == node.pool), None)
        name = node.pool or run.first.compute or SERVERLESS
        if pool is not None and pool.instance_type is not None:
            tier: Tier = "low_priority" if pool.job_tier == "Spot" else "dedicated"
            return Machine(name, pool.instance_type, tier, pool.price_per_hour)
        price = None if pool is None else pool.price_per_hour
        name = name.removeprefix("azureml:").rpartition("/")[2]
        if name not in self._machines:
            # It may have been deleted meanwhile.
            found = {} if name == SERVERLESS else self.service.compute(name) or {}
            tiers: dict[str, Tier] = {"dedicated": "dedicated", "lowpriority": "low_priority"}
            tier_text = str(found.get("vmPriority") or "").lower()
            self._machines[name] = Machine(name, found.get("vmSize"), tiers.get(tier_text))
        return replace(self._machines[name], price_per_hour=price)


def open_jobs(workspace: WorkspaceName) -> Jobs:
    """Return the reader of a workspace's jobs, without sending a request.

    Raises:
        MissingExtra: azure-identity is not installed.
    """
    return Jobs(developer_jobs(NodeEnvironment.read().with_variables(workspace.variables)))


def _record(name: str, document: Mapping[str, Any]) -> JobRecord:
    pipeline = document.get("jobType") == "Pipeline"
    holders = [document.get("environmentVariables")]
    if pipeline:
        holders = [step.get("environment_variables") for step in (document.get("jobs") or {}).values()]
    studio = next((each for kind, each in (document.get("services") or {}).items() if kind.lower() == "studio"), None)
    return JobRecord(
        name,
        str(document.get("status")),
        display_name=str(document.get("displayName") or ""),
        pipeline=pipeline,
        variables=tuple(holder or {} for holder in holders),
        compute=document.get("computeId"),
        studio_url=(studio or {}).get("endpoint"),
    )
