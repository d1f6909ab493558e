"""What there is of a run: its jobs in Azure ML, those that were claimed, and those that were asked to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from azureml_elastic.config.plan import Plan
from azureml_elastic.config.replacement import CANCELLED_TAG
from azureml_elastic.config.resources import NodePool, step_names
from azureml_elastic.errors import PlanError
from azureml_elastic.node.replacement.job_document import SINGLE, NodeSlot, plan_of, slot_of, timeout_of
from azureml_elastic.node.replacement.jobs import RunRecord, WorkspaceJobs
from azureml_elastic.node.replacement.policy import JobState, NodeJob
from azureml_elastic.node.table import Table

__all__ = ["CLAIM_PREFIX", "REFUSED_PREFIX", "STOP_PREFIX", "Observation", "RunObserver", "Shape"]

CLAIM_PREFIX = "job."
"""Of the rows that say who submits a job; its name follows."""

REFUSED_PREFIX = "refused."
"""Of the rows of jobs that Azure ML does not take."""

STOP_PREFIX = "stop."
"""Of the rows of jobs that supervision has asked to end."""

_COMPLETED = "Completed"
_WAITING = frozenset({"NotStarted", "Queued", "Provisioning", "Paused"})
_COMING = frozenset({"Preparing", "Starting"})
"""It has a machine, and is waited for no longer."""
_ENDED = frozenset({_COMPLETED, "Failed", "NotResponding"})
_CANCELLED = frozenset({"CancelRequested", "Canceled"})
_FINAL = frozenset({_COMPLETED, "Failed", "Canceled"})


@dataclass(frozen=True)
class Shape:
    """What a run looks like in Azure ML.

    Args:
        plan: of the run.
        document: the properties of its first job.
        pools: in the order of preference; one of no name where the job has none.
        stems: how the names of their nodes begin.
        most: nodes that may train at once. A single job, however many nodes it has, counts as one.
        timeout_s: after which Azure ML itself ends a node's job.
    """

    plan: Plan
    document: Mapping[str, Any]
    pools: tuple[NodePool, ...]
    stems: tuple[str, ...]
    most: int
    timeout_s: float

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Shape:
        """Read the document of a first job.

        Raises:
            PlanError: it is no elastic job.
        """
        plan = plan_of(document)
        timeout_s = timeout_of(document)
        if document.get("jobType") != "Pipeline":
            pools: tuple[NodePool, ...] = (NodePool("compute", max_instance_count=1),)
            return cls(plan, document, pools, (SINGLE,), 1, timeout_s)
        most = plan.resources.max_instance_count
        pools = plan.pools or (NodePool("compute", max_instance_count=most),)
        return cls(plan, document, pools, step_names(plan.pools), most, timeout_s)

    @property
    def is_single(self) -> bool:
        """Whether the run is one job, not a pipeline of its nodes."""
        return self.document.get("jobType") != "Pipeline"


@dataclass(frozen=True)
class Observation:
    """One look at the jobs.

    Args:
        jobs: all that were submitted or claimed for the run.
        cancelled: whether the run's owner has cancelled it.
        completed: whether a node's job has exited with 0.
    """

    jobs: tuple[NodeJob, ...]
    cancelled: bool
    completed: bool


class RunObserver:
    """Looks at the jobs of one run.

    Args:
        jobs: of the workspace.
        table: opened for the run.
        first: name of the job with which the run was submitted.
    """

    def __init__(self, jobs: WorkspaceJobs, table: Table, first: str) -> None:
        self._workspace = jobs
        self._table = table
        self._first = first
        self._shape: Shape | None = None
        self._final: dict[str, RunRecord] = {}
        self._requeued: dict[str, datetime] = {}

    @property
    def shape(self) -> Shape:
        """What the run looks like; asked for once.

        Raises:
            PlanError: the first job is not there, or is no elastic one.
            WorkspaceForbidden: the identity may not read jobs.
            WorkspaceUnavailable: the workspace does not answer.
        """
        if self._shape is None:
            document = self._workspace.document(self._first)
            if document is None:
                raise PlanError(
                    f"The workspace has no job {self._first!r}. Give the name of the job that was submitted."
                )
            self._shape = Shape.of(document)
        return self._shape

    def look(self) -> Observation:
        """Return the jobs as they are now.

        What was asked to end is read last: a job that another supervisor ends meanwhile must not look as if the run's
        owner had cancelled it.

        Raises:
            PlanError: the first job is not there, or is no elastic one.
            WorkspaceForbidden: the identity may not read jobs.
            WorkspaceUnavailable: the workspace does not answer.
            TableError: the table does not answer.
        """
        shape = self.shape
        claims = self._rows(CLAIM_PREFIX)
        own = self._workspace.record(self._first)
        found = list(self._first_jobs(shape, own))
        for name, claim in claims.items():
            if claim.get("first") == self._first:
                place = NodeSlot(shape.stems.index(str(claim["stem"])), int(claim["number"]))
                found.append((place, self._later(name, single=shape.is_single), name))
        refused, stopped = self._rows(REFUSED_PREFIX), frozenset(self._rows(STOP_PREFIX))
        firsts = len(found) - sum(claim.get("first") == self._first for claim in claims.values())
        jobs = tuple(
            self._job(place, record, name, shape, first=index < firsts, refused=refused.get(name), stopped=stopped)
            for index, (place, record, name) in enumerate(found)
        )
        removed = sum(job.state == "cancelled" and not job.stopped for job in jobs)
        cancelled = own is not None and (own.status in _CANCELLED or CANCELLED_TAG in own.tags)
        completed = any(record is not None and record.status == _COMPLETED for _, record, _ in found)
        return Observation(jobs, cancelled or removed >= shape.most, completed)

    def _rows(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        return {row.key.removeprefix(prefix): row.value for row in self._table.query(prefix)}

    def _first_jobs(self, shape: Shape, own: RunRecord | None) -> Iterator[tuple[NodeSlot, RunRecord | None, str]]:
        """Yield place, record and name of the first nodes; without a name where Azure ML has not made the step."""
        if shape.is_single:
            yield NodeSlot(0, 0), own, self._first
            return
        there = set()
        for record in self._workspace.children(self._first) or ():
            place = slot_of(record.display_name, shape.plan)
            if place is not None:
                there.add(place)
                yield place, record, record.name
        for name in shape.document.get("jobs") or {}:
            place = slot_of(name, shape.plan)
            if place is not None and place not in there:
                # The steps of a pipeline come some time after it, or never where it has ended.
                missing = RunRecord("", name, "Failed")
                if own is not None:
                    status = "Failed" if own.status in _FINAL else "NotStarted"
                    missing = replace(missing, status=status, created=own.created, ended=own.ended)
                yield place, missing, ""

    def _later(self, name: str, *, single: bool) -> RunRecord | None:
        """Return what became of a job that was claimed, ``None`` where it was never submitted."""
        if name in self._final:
            return self._final[name]
        record = self._workspace.record(name)
        if record is not None and not single:
            steps = self._workspace.children(name) or ()
            # The times are the step's: a pipeline begins when it is submitted.
            step = steps[0] if steps else replace(record, status="NotStarted", started=None)
            status = record.status if record.status in _CANCELLED or (not steps and record.status in _FINAL) else None
            record = replace(step, name=name, status=status or step.status)
        if record is not None and record.status in _FINAL:
            self._final[name] = record
        return record

    def _job(
        self,
        place: NodeSlot,
        record: RunRecord | None,
        name: str,
        shape: Shape,
        *,
        first: bool,
        refused: Mapping[str, Any] | None,
        stopped: frozenset[str],
    ) -> NodeJob:
        now = self._workspace.now
        job = NodeJob(place.pool, place.number, name, "waiting", first=first, stopped=name in stopped)
        if refused is not None:
            return replace(job, state="ended", ended_s=_seconds(datetime.fromisoformat(refused["at"]), now))
        if record is None:
            return replace(job, state="ended", ended_s=_seconds(None, now)) if first else replace(job, submitted=False)
        waiting = record.status in _WAITING
        # A job that waits again after it has run was put back into the queue; since when, nobody says.
        again = self._requeued.setdefault(name, now) if waiting and record.started is not None else None
        if not waiting:
            self._requeued.pop(name, None)
        job = replace(
            job,
            state=_state(record.status),
            waited_s=_seconds(again or record.created, now) if waiting else 0.0,
            ran_s=0.0 if record.started is None else _seconds(record.started, record.ended or again or now),
            ended_s=0.0 if record.ended is None else _seconds(record.ended, now),
        )
        # Azure ML cancels what has reached its own limit; that is nobody's wish.
        return replace(job, state="ended") if job.state == "cancelled" and job.ran_s >= shape.timeout_s else job


def _seconds(since: datetime | None, until: datetime) -> float:
    return 0.0 if since is None else max(0.0, (until - since).total_seconds())


def _state(status: str) -> JobState:
    if status in _WAITING or status in _COMING:
        return "waiting"
    if status in _CANCELLED:
        return "cancelled"
    return "ended" if status in _ENDED else "running"
