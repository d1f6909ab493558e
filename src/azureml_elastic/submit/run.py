"""A submitted run as the jobs of its nodes describe it, wherever these are read from. Without azure-ai-ml.

The logs of the nodes' jobs are as Azure ML keeps them while a job runs and after its end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from azureml_elastic.config.plan import Plan
from azureml_elastic.config.resources import first_nodes, replacement_name, step_names
from azureml_elastic.environment import names as variables
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.client import first_line

_FOLDER = "user_logs/"
"""Folder of what the command prints; the other files are those of the service."""

_ENTERED = re.compile(r"Round (\d+): rank 0 of [\d,]+ nodes?\b")

_LONGEST_GAP = 3

TERMINAL = frozenset({"Completed", "Failed", "Canceled"})
"""The final states of a job."""


def read_logs(files: Mapping[str, str]) -> dict[str, str]:
    """Return what the command of a job has printed, by file: a job of several nodes has one for each.

    Args:
        files: addresses of the job's log files by name.

    Raises:
        SubmitError: a log cannot be read.
    """
    from azure.core import PipelineClient
    from azure.core.exceptions import AzureError
    from azure.core.rest import HttpRequest, HttpResponse

    texts: dict[str, str] = {}
    for name, url in sorted(files.items()):
        if name.startswith(_FOLDER):
            http: PipelineClient[HttpRequest, HttpResponse] = PipelineClient(base_url=url)
            try:
                with http, http.send_request(HttpRequest("GET", url)) as response:
                    response.raise_for_status()
                    texts[name.removeprefix(_FOLDER)] = response.text(encoding="utf-8")
            except AzureError as error:
                raise SubmitError(f"Azure could not give the log {name}: {first_line(error)}") from error
    return texts


def joined(texts: Mapping[str, str]) -> str:
    """Return the texts of a job's files in one; several follow each other under their names."""
    return "\n".join(_named(name, text, several=len(texts) > 1) for name, text in texts.items())


class GrowingLog:
    """What is added to the files of a job while it runs."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def added(self, texts: Mapping[str, str], *, last: bool) -> str:
        """Return what was added since the last call, in whole lines; of several files under their names.

        Args:
            last: whether nothing will be added any more, so that a line without a line feed is returned, too.
        """
        parts = []
        for name, text in texts.items():
            fresh = text.removeprefix(self._known.get(name, ""))
            fresh = fresh if last else fresh[: fresh.rfind("\n") + 1]
            self._known[name] = self._known.get(name, "") + fresh
            if fresh:
                parts.append(_named(name, fresh, several=len(texts) > 1))
        return "".join(parts)


def _named(name: str, text: str, *, several: bool) -> str:
    return f"==> {name} <==\n{text}" if several else text


def leading_node(logs: Mapping[str, str]) -> str | None:
    """Return the node that was rank 0 in the last round, by what the nodes' agents have logged; ``None`` if unknown."""
    rounds = {node: max(map(int, _ENTERED.findall(text)), default=0) for node, text in logs.items()}
    last = max(rounds.values(), default=0)
    return next((node for node, number in rounds.items() if number == last), None) if last else None


@dataclass(frozen=True)
class JobRecord:
    """A job of the workspace, or a step of a pipeline.

    Args:
        status: status in Azure ML's spelling.
        display_name: name that the studio shows, for a step that of the step.
        variables: environment variables of the job, or of each step of a pipeline that was not read from its history.
    """

    name: str
    status: str
    display_name: str = ""
    pipeline: bool = False
    variables: tuple[Mapping[str, str], ...] = ()
    compute: str | None = None
    studio_url: str | None = None

    def variable(self, name: str) -> str | None:
        """Return an environment variable of the job or of the first of its steps that has it."""
        return next((str(each[name]) for each in self.variables if each.get(name) is not None), None)


class JobReader(Protocol):
    """What reads the jobs of a workspace."""

    def job(self, name: str) -> JobRecord | None:
        """Return a job, ``None`` if there is none of this name."""

    def steps(self, name: str) -> Sequence[JobRecord]:
        """Return the steps of a pipeline that exist by now."""


@dataclass(frozen=True)
class NodeOfRun:
    """The job of a node.

    Args:
        node: name of the node, such as ``spot_0``.
        pool: compute of the node's pool; ``None`` for a run without pools.
    """

    node: str
    job: str
    status: str
    pool: str | None = None

    @property
    def active(self) -> bool:
        """Whether the job has not ended."""
        return self.status not in TERMINAL


class ElasticRun:
    """A run that was submitted as an elastic job, by the name of its job or of that of a replacement node."""

    def __init__(self, jobs: JobReader, name: str) -> None:
        self._jobs = jobs
        job = self._read(name)
        earlier = job.variable(variables.FIRST_JOB)
        self.first = job if earlier is None else self._read(earlier)
        """The run's first job, as it was when it was read."""
        self.name = self.first.name
        text = self.first.variable(variables.PLAN)
        if text is None:
            raise SubmitError(
                f"The job {self.name!r} is no elastic job: none of its steps has a plan. Give the name of a submitted "
                "ElasticCommandJob."
            )
        self.plan = Plan.from_json(text)
        """The plan of the run."""

    @property
    def status(self) -> str:
        """Status of the first job in Azure ML's spelling."""
        return self.first.status

    @property
    def run_id(self) -> str:
        """Run id of the nodes, by which another job continues the run: the job's name, and that of its step."""
        given = {name: self.first.variable(name) or "" for name in (variables.RUN_ID, variables.STEP)}
        return self.plan.run_id_of(given, job=self.name, root=self.name) or self.name

    @property
    def checkpoint_path(self) -> str | None:
        """Path of the run's checkpoint policy; ``None`` for the default."""
        return self.plan.checkpoint.path

    @property
    def jobs(self) -> list[str]:
        """The names of the first job and of the jobs of replacement nodes."""
        return [self.name, *(job.name for job in self._replacements())]

    def nodes(self) -> list[NodeOfRun]:
        """Return the jobs of all nodes in the order of submission."""
        if not self.first.pipeline:
            return [NodeOfRun("job", job.name, job.status) for job in (self.first, *self._replacements())]
        found: list[NodeOfRun] = []
        for name in self.jobs:
            for step in self._jobs.steps(name):
                node = step.display_name or step.name
                found.append(NodeOfRun(node, step.name, step.status, self._pool_of(node)))
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

    def _read(self, name: str) -> JobRecord:
        job = self._jobs.job(name)
        if job is None:
            raise SubmitError(f"The workspace has no job {name!r}. Give the name that the submission printed.")
        return job

    def _replacements(self) -> Iterator[JobRecord]:
        """Yield the jobs of replacement nodes, whose names are predictable and have few gaps."""
        plan = self.plan
        most = plan.resources.max_instance_count
        if self.first.pipeline:
            stems = dict(zip(step_names(plan.pools), first_nodes(plan.pools, most) or (most,), strict=True))
        else:
            stems = {"job": most if plan.resources.effective_placement == "service" else 1}
        for stem, first in stems.items():
            missing = 0
            for number in itertools.count(first):
                job = self._jobs.job(replacement_name(self.name, stem, number))
                missing = missing + 1 if job is None else 0
                if job is not None:
                    yield job
                if missing == _LONGEST_GAP:  # a process may have died before it submitted what it had claimed
                    break

    def _pool_of(self, node: str) -> str | None:
        stem = node.rpartition("_")[0]
        stems = step_names(self.plan.pools)
        return self.plan.pools[stems.index(stem)].compute if self.plan.pools and stem in stems else None
