"""A submitted run: its job, the jobs of its nodes, and those that were asked for later."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import SubmitError
from azureml_elastic.spec import environment as variables
from azureml_elastic.spec.plan import Plan
from azureml_elastic.spec.pools import first_nodes, replacement_name, step_names
from azureml_elastic.spec.supervision import CANCELLED_TAG

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

__all__ = ["TERMINAL", "NodeOfRun", "SubmittedRun"]

TERMINAL = frozenset({"Completed", "Failed", "Canceled"})
"""The states that a job never leaves."""


@dataclass(frozen=True)
class NodeOfRun:
    """A node's job.

    Args:
        node: such as ``spot_0``.
        job: its name.
        status: as Azure ML writes it.
        pool: the compute, where the run has pools.
    """

    node: str
    job: str
    status: str
    pool: str | None = None


class SubmittedRun:
    """A run that was submitted as an elastic job.

    Args:
        client: of the workspace.
        name: of the job that submitting returned.

    Raises:
        SubmitError: the job is no elastic one.
    """

    def __init__(self, client: MLClient, name: str) -> None:
        self._client = client
        self.job: Any = client.jobs.get(name)
        """As azure-ai-ml gives it."""
        self.name = name
        self._plan = _plan_of(self.job)
        self._is_pipeline = self.job.type == "pipeline"

    @property
    def status(self) -> str:
        """Of the first job, as Azure ML writes it."""
        return _status(self.job)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs: the first one, and those that brought nodes later."""
        return [self.name, *(name for name, _ in self._later())]

    def nodes(self) -> list[NodeOfRun]:
        """Return the jobs of all nodes in the order of their submission."""
        found: list[NodeOfRun] = []
        if not self._is_pipeline:
            found.append(NodeOfRun("job", self.name, self.status))
            return found + [NodeOfRun("job", name, _status(job)) for name, job in self._later()]
        for name in self.jobs:
            for child in self._client.jobs.list(parent_job_name=name):
                node = str(child.display_name or child.name)
                found.append(NodeOfRun(node, str(child.name), _status(child), self._pool_of(node)))
        return found

    def node(self, name: str | None) -> NodeOfRun:
        """Return a node's job.

        Args:
            name: such as ``spot_0``; ``None`` takes the first that runs, else the last that has run.

        Raises:
            SubmitError: there is no such node.
        """
        nodes = self.nodes()
        if name is not None:
            chosen = [node for node in nodes if name in (node.node, node.job)]
        else:
            running, good, bad = (
                [node for node in nodes if node.status in states]
                for states in (("Running", "Finalizing"), ("Completed",), ("Failed",))
            )
            chosen = running or good[-1:] or bad[-1:] or nodes
        if not chosen:
            there = ", ".join(node.node for node in nodes) or "none yet"
            raise SubmitError(f"The run {self.name!r} has no node {name!r}. There are: {there}.")
        return chosen[0]

    def cancel(self, asked: Callable[[str], object] = lambda _: None) -> None:
        """Ask all jobs of the run to end.

        A first job that has ended cannot be cancelled any more; it is marked, so that no supervisor brings the run
        back.

        Args:
            asked: is told the name of each job that had not ended.

        Raises:
            SubmitError: the jobs were told to end, but the first one could not be marked.
        """
        problem = self._mark() if self.status in ("Failed", "Canceled") else None
        for name in self.jobs:
            if _status(self._client.jobs.get(name)) not in TERMINAL:
                self._client.jobs.begin_cancel(name)
                asked(name)
        if problem is not None:
            raise SubmitError(
                f"All jobs of {self.name} are told to end, but the run could not be marked as cancelled ({problem}). "
                "End every 'azureml-elastic supervise' of it, which would bring it back."
            )

    def _mark(self) -> str | None:
        """Mark the first job; return why that failed. Releases of azure-ai-ml before 1.35 send it whole again."""
        from azure.ai.ml.exceptions import MlException
        from azure.core.exceptions import AzureError

        self.job.tags = {**(self.job.tags or {}), CANCELLED_TAG: "true"}
        try:
            self._client.jobs.create_or_update(self.job)
        except (AzureError, MlException) as error:
            return str(error).strip().partition("\n")[0]
        return None

    def _later(self) -> Iterator[tuple[str, Any]]:
        """Yield the jobs that brought nodes later: their names are known, and without a gap."""
        from azure.core.exceptions import ResourceNotFoundError

        if self._is_pipeline:
            plan = self._plan
            most = plan.resources.max_instance_count
            stems = dict(zip(step_names(plan.pools), first_nodes(plan.pools, most) or (most,), strict=True))
        else:
            stems = {"job": 1}
        for stem, first in stems.items():
            for number in itertools.count(first):
                name = replacement_name(self.name, stem, number)
                try:
                    yield name, self._client.jobs.get(name)
                except ResourceNotFoundError:
                    break

    def _pool_of(self, node: str) -> str | None:
        stem = node.rpartition("_")[0]
        stems = step_names(self._plan.pools)
        return self._plan.pools[stems.index(stem)].compute if self._plan.pools and stem in stems else None


def _status(job: Any) -> str:
    return str(getattr(job.status, "value", job.status))


def _plan_of(job: Any) -> Plan:
    holders = list(job.jobs.values()) if job.type == "pipeline" else [job]
    for holder in holders:
        text = (getattr(holder, "environment_variables", None) or {}).get(variables.PLAN)
        if text is not None:
            return Plan.from_json(text)
    raise SubmitError(
        f"The job {job.name!r} is no elastic job: none of its steps has a plan. Name the job that submitting an "
        "ElasticCommandJob returned."
    )
