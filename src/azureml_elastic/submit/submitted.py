"""A submitted run: its first job, the jobs of its nodes, and the jobs of replacement nodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from azureml_elastic.config import environment as variables
from azureml_elastic.config.plan import Plan
from azureml_elastic.config.replacement import CANCELLED_TAG
from azureml_elastic.config.resources import SERVERLESS, first_nodes, replacement_name, step_names
from azureml_elastic.errors import SubmitError
from azureml_elastic.ledger.prices import Tier
from azureml_elastic.submit.client import first_line
from azureml_elastic.submit.sdk_hooks import running_time

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

__all__ = ["TERMINAL", "Machine", "NodeOfRun", "SubmittedRun"]

_LONGEST_GAP = 3

TERMINAL = frozenset({"Completed", "Failed", "Canceled"})
"""The final states of a job."""


@dataclass(frozen=True)
class NodeOfRun:
    """The job of a node.

    Args:
        node: name of the node, such as ``spot_0``.
        job: name of the job.
        status: status in Azure ML's spelling.
        pool: compute of the node's pool; ``None`` for a run without pools.
    """

    node: str
    job: str
    status: str
    pool: str | None = None


@dataclass(frozen=True)
class Machine:
    """Machine of a node.

    Args:
        pool: compute.
        size: VM size, ``None`` if it is unknown, as on serverless compute without an instance type.
        tier: tier; ``None`` if it is unknown.
        price_per_hour: price that the job gives for its pool, in USD.
    """

    pool: str
    size: str | None
    tier: Tier | None
    price_per_hour: float | None = None


class SubmittedRun:
    """A run that was submitted as an elastic job.

    Args:
        client: client of the workspace.
        name: name of the submitted job, or of the job of a replacement node.

    Raises:
        SubmitError: the job is not an elastic job.
    """

    def __init__(self, client: MLClient, name: str) -> None:
        self._client = client
        self._machines: dict[str, Machine] = {}
        self.job: Any = client.jobs.get(name)
        """The run's first job, as returned by azure-ai-ml."""
        earlier = _variable_of(self.job, variables.FIRST_JOB)
        if earlier is not None:
            self.job = client.jobs.get(earlier)
        self.name = str(self.job.name)
        self.plan = _plan_of(self.job)
        """The plan of the run."""
        self._is_pipeline = self.job.type == "pipeline"

    @property
    def status(self) -> str:
        """Status of the first job in Azure ML's spelling."""
        return _status(self.job)

    @property
    def run_id(self) -> str:
        """Run id of the nodes, by which another job continues the run: the job's name, and that of its step."""
        given = {name: _variable_of(self.job, name) or "" for name in (variables.RUN_ID, variables.STEP)}
        return self.plan.run_id_of(given, job=self.name, root=self.name) or self.name

    @property
    def checkpoint_path(self) -> str | None:
        """Path of the run's checkpoint policy; ``None`` for the default."""
        return self.plan.checkpoint.path

    @property
    def jobs(self) -> list[str]:
        """The names of the first job and of the jobs of replacement nodes."""
        return [self.name, *(name for name, _ in self._replacements())]

    def nodes(self) -> list[NodeOfRun]:
        """Return the jobs of all nodes in the order of submission."""
        if not self._is_pipeline:
            jobs = [(self.name, self.job), *self._replacements()]
            return [NodeOfRun("job", name, _status(job)) for name, job in jobs]
        found: list[NodeOfRun] = []
        for name in self.jobs:
            for child in self._client.jobs.list(parent_job_name=name):
                node = str(child.display_name or child.name)
                found.append(NodeOfRun(node, str(child.name), _status(child), self._pool_of(node)))
        return found

    def node(self, name: str | None) -> NodeOfRun:
        """Return a node's job.

        Args:
            name: name of the node or of its job. ``None`` selects the first running node, else the last completed one,
                else the last failed one.

        Raises:
            SubmitError: there is no such node.
        """
        nodes = self.nodes()
        if name is not None:
            chosen = [node for node in nodes if name in (node.node, node.job)]
        else:
            running, completed, failed = (
                [node for node in nodes if node.status in states]
                for states in (("Running", "Finalizing"), ("Completed",), ("Failed",))
            )
            chosen = running or completed[-1:] or failed[-1:] or nodes
        if not chosen:
            there = ", ".join(node.node for node in nodes) or "none yet"
            raise SubmitError(f"The run {self.name!r} has no node {name!r}. There are: {there}.")
        return chosen[0]

    def running_time(self, job: str) -> tuple[datetime | None, datetime | None]:
        """Return when a job began and ended to run, ``None`` for what has not happened.

        Raises:
            azure.core.exceptions.AzureError: the job cannot be read.
        """
        return running_time(self._client, job)

    def machine(self, node: NodeOfRun) -> Machine:
        """Return the machine of a node as its pool and its compute describe it.

        Raises:
            azure.core.exceptions.AzureError: the compute cannot be read.
        """
        from azure.core.exceptions import ResourceNotFoundError

        pool = next((each for each in self.plan.pools if each.compute == node.pool), None)
        name = node.pool or str(getattr(self.job, "compute", None) or SERVERLESS)
        if pool is not None and pool.instance_type is not None:
            tier: Tier = "low_priority" if pool.job_tier == "Spot" else "dedicated"
            return Machine(name, pool.instance_type, tier, pool.price_per_hour)
        price = None if pool is None else pool.price_per_hour
        name = name.removeprefix("azureml:").rpartition("/")[2]
        if name not in self._machines:
            try:
                found = None if name == SERVERLESS else self._client.compute.get(name)
            except ResourceNotFoundError:  # deleted meanwhile
                found = None
            tier_text = str(getattr(found, "tier", None) or "").lower().replace("_", "")
            tiers: dict[str, Tier] = {"dedicated": "dedicated", "lowpriority": "low_priority"}
            self._machines[name] = Machine(name, getattr(found, "size", None), tiers.get(tier_text), None)
        return replace(self._machines[name], price_per_hour=price)

    def cancel(self, cancelling: Callable[[str], object] = lambda _: None) -> None:
        """Cancel all jobs of the run.

        A first job that has ended cannot be cancelled any more; it is tagged, so that its nodes are not replaced.

        Args:
            cancelling: callback with the name of each job that is being cancelled.

        Raises:
            SubmitError: a job could not be cancelled, or the first one not be tagged; all others were.
        """
        problems: list[str] = []
        if self.status in ("Failed", "Canceled"):
            self._tag(problems)
        for name in self.jobs:
            with _collected(problems, name):
                if _status(self._client.jobs.get(name)) not in TERMINAL:
                    self._client.jobs.begin_cancel(name)
                    cancelling(name)
        # It may have failed before it could be cancelled.
        if self.status == "Running" and _status(self._client.jobs.get(self.name)) == "Failed":
            self._tag(problems)
        if problems:
            raise SubmitError(
                f"Not all jobs of {self.name} could be cancelled ({'; '.join(problems)}). Try again, and "
                "stop every 'azureml-elastic replace-nodes' of the run, which might submit nodes again."
            )

    def _tag(self, problems: list[str]) -> None:
        """Tag the first job as cancelled. azure-ai-ml before 1.35 uploads the whole job."""
        self.job.tags = {**(self.job.tags or {}), CANCELLED_TAG: "true"}
        with _collected(problems, f"{self.name} could not be tagged as cancelled"):
            self._client.jobs.create_or_update(self.job)

    def _replacements(self) -> Iterator[tuple[str, Any]]:
        """Yield the jobs of replacement nodes, whose names are predictable and have few gaps."""
        from azure.core.exceptions import ResourceNotFoundError

        plan = self.plan
        most = plan.resources.max_instance_count
        if self._is_pipeline:
            stems = dict(zip(step_names(plan.pools), first_nodes(plan.pools, most) or (most,), strict=True))
        else:
            stems = {"job": most if plan.resources.effective_placement == "service" else 1}
        for stem, first in stems.items():
            missing = 0
            for number in itertools.count(first):
                name = replacement_name(self.name, stem, number)
                try:
                    yield name, self._client.jobs.get(name)
                except ResourceNotFoundError:
                    missing += 1
                else:
                    missing = 0
                if missing == _LONGEST_GAP:  # a process may have died before it submitted what it had claimed
                    break

    def _pool_of(self, node: str) -> str | None:
        stem = node.rpartition("_")[0]
        stems = step_names(self.plan.pools)
        return self.plan.pools[stems.index(stem)].compute if self.plan.pools and stem in stems else None


@contextlib.contextmanager
def _collected(problems: list[str], action: str) -> Iterator[None]:
    """Append errors of Azure's packages to a list instead of raising them."""
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError

    try:
        yield
    except (AzureError, MlException) as error:
        problems.append(f"{action}: {first_line(error)}")


def _status(job: Any) -> str:
    return str(getattr(job.status, "value", job.status))


def _variable_of(job: Any, variable: str) -> str | None:
    holders = list(job.jobs.values()) if job.type == "pipeline" else [job]
    found = [(getattr(holder, "environment_variables", None) or {}).get(variable) for holder in holders]
    return next((str(text) for text in found if text is not None), None)


def _plan_of(job: Any) -> Plan:
    text = _variable_of(job, variables.PLAN)
    if text is None:
        raise SubmitError(
            f"The job {job.name!r} is no elastic job: none of its steps has a plan. Give the name of a submitted "
            "ElasticCommandJob."
        )
    return Plan.from_json(text)
