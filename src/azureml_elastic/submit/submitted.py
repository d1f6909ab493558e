"""A submitted run: its first job, the jobs of its nodes, and the jobs of replacement nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_elastic.config import environment as variables
from azureml_elastic.config.plan import Plan
from azureml_elastic.config.replacement import CANCELLED_TAG
from azureml_elastic.config.resources import first_nodes, replacement_name, step_names
from azureml_elastic.errors import SubmitError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

__all__ = ["TERMINAL", "NodeOfRun", "SubmittedRun"]

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
        self.job: Any = client.jobs.get(name)
        """The run's first job, as returned by azure-ai-ml."""
        earlier = _variable_of(self.job, variables.FIRST_JOB)
        if earlier is not None:
            self.job = client.jobs.get(earlier)
        self.name = str(self.job.name)
        self._plan = _plan_of(self.job)
        self._is_pipeline = self.job.type == "pipeline"

    @property
    def status(self) -> str:
        """Status of the first job in Azure ML's spelling."""
        return _status(self.job)

    @property
    def jobs(self) -> list[str]:
        """The names of the first job and of the jobs of replacement nodes."""
        return [self.name, *(name for name, _ in self._later())]

    def nodes(self) -> list[NodeOfRun]:
        """Return the jobs of all nodes in the order of submission."""
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
            name: name of the node or of its job. ``None`` selects the first running node, else the last completed one,
                else the last failed one.

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
        """Cancel all jobs of the run.

        A first job that has ended cannot be cancelled any more; it is tagged, so that its nodes are not replaced.

        Args:
            asked: callback with the name of each job that is being cancelled.

        Raises:
            SubmitError: a job could not be cancelled, or the first one not be tagged; all others were.
        """
        problems = [self._tag()] if self.status in ("Failed", "Canceled") else []
        problems += [self._cancel(name, asked) for name in self.jobs]
        # It may have failed before it could be cancelled.
        if self.status == "Running" and _status(self._client.jobs.get(self.name)) == "Failed":
            problems.append(self._tag())
        found = [problem for problem in problems if problem is not None]
        if found:
            raise SubmitError(
                f"Not all jobs of {self.name} could be cancelled ({'; '.join(found)}). Try again, and "
                "stop every 'azureml-elastic replace-nodes' of the run, which might submit nodes again."
            )

    def _cancel(self, name: str, asked: Callable[[str], object]) -> str | None:
        """Cancel a job unless it has ended; return the error, if any."""
        from azure.ai.ml.exceptions import MlException
        from azure.core.exceptions import AzureError

        try:
            if _status(self._client.jobs.get(name)) in TERMINAL:
                return None
            self._client.jobs.begin_cancel(name)
        except (AzureError, MlException) as error:
            return f"{name}: {_first_line(error)}"
        asked(name)
        return None

    def _tag(self) -> str | None:
        """Tag the first job as cancelled; return the error, if any. azure-ai-ml before 1.35 uploads the whole job."""
        from azure.ai.ml.exceptions import MlException
        from azure.core.exceptions import AzureError

        self.job.tags = {**(self.job.tags or {}), CANCELLED_TAG: "true"}
        try:
            self._client.jobs.create_or_update(self.job)
        except (AzureError, MlException) as error:
            return f"{self.name} could not be tagged as cancelled: {_first_line(error)}"
        return None

    def _later(self) -> Iterator[tuple[str, Any]]:
        """Yield the jobs of replacement nodes, whose names are predictable and have few gaps."""
        from azure.core.exceptions import ResourceNotFoundError

        if self._is_pipeline:
            plan = self._plan
            most = plan.resources.max_instance_count
            stems = dict(zip(step_names(plan.pools), first_nodes(plan.pools, most) or (most,), strict=True))
        else:
            stems = {"job": 1}
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
        stems = step_names(self._plan.pools)
        return self._plan.pools[stems.index(stem)].compute if self._plan.pools and stem in stems else None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


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
