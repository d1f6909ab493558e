"""A submitted run: its job, the jobs of its nodes, and those that were asked for later."""

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
        name: of the job that submitting returned, or of one that has brought the run a node later.

    Raises:
        SubmitError: the job is no elastic one.
    """

    def __init__(self, client: MLClient, name: str) -> None:
        self._client = client
        self.job: Any = client.jobs.get(name)
        """The first one, as azure-ai-ml gives it."""
        earlier = _variable_of(self.job, variables.FIRST_JOB)
        if earlier is not None:
            self.job = client.jobs.get(earlier)
        self.name = str(self.job.name)
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

        A first job that has ended cannot be cancelled any more; it is marked, so that no replacement job brings the run
        back.

        Args:
            asked: is told the name of each job that had not ended.

        Raises:
            SubmitError: all jobs were asked, and one could not be ended, or the first one not marked.
        """
        problems = [self._mark()] if self.status in ("Failed", "Canceled") else []
        problems += [self._end(name, asked) for name in self.jobs]
        # It may have failed before it could be cancelled.
        if self.status == "Running" and _status(self._client.jobs.get(self.name)) == "Failed":
            problems.append(self._mark())
        said = [problem for problem in problems if problem is not None]
        if said:
            raise SubmitError(
                f"The jobs of {self.name} were told to end, but not all could be ({'; '.join(said)}). Try again, and "
                "end every 'azureml-elastic replace-nodes' of the run, which might bring it back."
            )

    def _end(self, name: str, asked: Callable[[str], object]) -> str | None:
        """Ask a job to end unless it has; return why that failed."""
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

    def _mark(self) -> str | None:
        """Mark the first job; return why that failed. Releases of azure-ai-ml before 1.35 send it whole again."""
        from azure.ai.ml.exceptions import MlException
        from azure.core.exceptions import AzureError

        self.job.tags = {**(self.job.tags or {}), CANCELLED_TAG: "true"}
        try:
            self._client.jobs.create_or_update(self.job)
        except (AzureError, MlException) as error:
            return f"{self.name} could not be marked as cancelled: {_first_line(error)}"
        return None

    def _later(self) -> Iterator[tuple[str, Any]]:
        """Yield the jobs that brought nodes later: their names are known, with few gaps."""
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
            f"The job {job.name!r} is no elastic job: none of its steps has a plan. Name the job that submitting an "
            "ElasticCommandJob returned."
        )
    return Plan.from_json(text)
