"""Observation of a run: its jobs in Azure ML and the table's rows of claimed, refused and cancelled jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from azureml_elastic.config.plan import Plan
from azureml_elastic.config.policies import CANCELLED_TAG
from azureml_elastic.config.resources import NodePool, step_names
from azureml_elastic.errors import PlanError
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.replacement.job_document import (
    SINGLE,
    NodeSlot,
    grows_by_service,
    plan_of,
    slot_of,
    timeout_of,
)
from azureml_elastic.node.replacement.jobs import RunRecord, WorkspaceJobs
from azureml_elastic.node.replacement.policy import EARLY_S, JobState, NodeJob
from azureml_elastic.node.table import Table

CLAIM_PREFIX = "job."  # claimed submissions; in all three the job name follows
REFUSED_PREFIX = "refused."  # jobs that Azure ML refused
STOP_PREFIX = "stop."  # jobs that were cancelled as surplus

_COMPLETED = "Completed"
_WAITING = frozenset({"NotStarted", "Queued", "Provisioning", "Paused"})
_COMING = frozenset({"Preparing", "Starting"})  # on a machine, and no longer waiting for one
_ENDED = frozenset({_COMPLETED, "Failed", "NotResponding"})
_CANCELLED = frozenset({"CancelRequested", "Canceled"})
_FINAL = frozenset({_COMPLETED, "Failed", "Canceled"})


@dataclass(frozen=True)
class RunShape:
    """Static description of a run in Azure ML.

    Args:
        document: properties of the first job.
        pools: pools in the order of preference; one unnamed pool if the job has none.
        stems: stems of the node names by pool.
        most: maximum number of concurrent nodes; 1 for a single job of the placement ``gang``, whatever its node count.
        timeout_s: seconds after which Azure ML cancels a node's job.
    """

    plan: Plan
    document: Mapping[str, Any]
    pools: tuple[NodePool, ...]
    stems: tuple[str, ...]
    most: int
    timeout_s: float

    @classmethod
    def read(cls, jobs: WorkspaceJobs, name: str) -> RunShape:
        """Read the document of a first job.

        Raises:
            PlanError: the job does not exist or is not an elastic job.
            WorkspaceForbidden: the identity may not read jobs.
            WorkspaceUnavailable: the workspace does not answer.
        """
        document = jobs.document(name)
        if document is None:
            raise PlanError(f"The workspace has no job {name!r}. Give the name of the job that was submitted.")
        plan, timeout_s = plan_of(document), timeout_of(document)
        most = plan.resources.max_instance_count
        if document.get("jobType") != "Pipeline":
            most = most if grows_by_service(plan) else 1
            return cls(plan, document, (NodePool("compute", max_instance_count=most),), (SINGLE,), most, timeout_s)
        pools = plan.pools or (NodePool("compute", max_instance_count=most),)
        return cls(plan, document, pools, step_names(plan.pools), most, timeout_s)

    @property
    def is_single(self) -> bool:
        """Whether the run is a single job instead of a pipeline of nodes."""
        return self.document.get("jobType") != "Pipeline"


@dataclass(frozen=True)
class Observation:
    """State of the jobs at one time.

    Args:
        jobs: all submitted or claimed jobs of the run.
        cancelled: whether the owner has cancelled the run.
        completed: whether a node's job has exited with 0.
    """

    jobs: tuple[NodeJob, ...]
    cancelled: bool
    completed: bool


class RunObserver:
    """Reader of the jobs of one run, given the name of its first job."""

    def __init__(self, jobs: WorkspaceJobs, table: Table, first: str) -> None:
        self._workspace = jobs
        self._table = table
        self._first = first
        self._final: dict[str, RunRecord] = {}
        self._requeued: dict[str, datetime] = {}
        self._came = 0

    @cached_property
    def shape(self) -> RunShape:
        """Static description of the run, read once; raises as :meth:`RunShape.read`."""
        return RunShape.read(self._workspace, self._first)

    def observe(self, fallback_after_s: float) -> Observation:
        """Return the current state of the jobs.

        With the placement ``service`` the first job stands for its maximum of nodes. Those that Azure ML has not
        started ``fallback_after_s`` seconds after the job count as ended, so that they are requested as jobs.
        Cancellations are read last: a job that another process cancels meanwhile must not look cancelled by the owner.
        Raises as :meth:`RunShape.read`, and ``TableError``.
        """
        shape = self.shape
        served = shape.is_single and shape.most > 1
        row = self._table.get(ROUND_KEY) if served else None  # before the jobs: a member's job runs
        claims = self._rows(CLAIM_PREFIX)
        own = self._workspace.record(self._first)
        first_jobs = list(self._first_jobs(shape, own))
        claimed_jobs = []
        for name, claim in claims.items():
            if claim.get("first") == self._first:
                slot = NodeSlot(shape.stems.index(str(claim["stem"])), int(claim["number"]))
                claimed_jobs.append((slot, self._claimed_job(name, single=shape.is_single), name))
        # After the jobs: the row of a cancellation is written before the request, so a cancelled job has it.
        refused, stopped = self._rows(REFUSED_PREFIX), self._rows(STOP_PREFIX)
        jobs = []
        for first, group in ((True, first_jobs), (False, claimed_jobs)):
            for slot, record, name in group:
                job = NodeJob(slot.pool, slot.number, name, "waiting", first=first, stopped=name in stopped)
                jobs.append(self._with_state(job, record, shape.timeout_s, refused.get(name)))
        if served:
            jobs = self._without_missing(
                jobs, Round() if row is None else Round.from_value(row.value), fallback_after_s
            )
        cancelled = own is not None and (own.status in _CANCELLED or CANCELLED_TAG in own.tags)
        cancelled |= sum(job.removed for job in jobs) >= shape.most
        records = [record for _, record, _ in (*first_jobs, *claimed_jobs) if record is not None]
        return Observation(tuple(jobs), cancelled, any(record.status == _COMPLETED for record in records))

    def _rows(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        return {row.key.removeprefix(prefix): row.value for row in self._table.query(prefix)}

    def _first_jobs(self, shape: RunShape, own: RunRecord | None) -> Iterator[tuple[NodeSlot, RunRecord | None, str]]:
        """Yield slot, record and name of the first nodes; the name is empty if Azure ML has not created the step."""
        if shape.is_single:
            yield from ((NodeSlot(0, number), own, self._first) for number in range(shape.most))
            return
        there = set()
        for record in self._workspace.children(self._first) or ():
            slot = slot_of(record.display_name, shape.plan)
            if slot is not None:
                there.add(slot)
                yield slot, record, record.name
        for name in shape.document.get("jobs") or {}:
            slot = slot_of(name, shape.plan)
            if slot is not None and slot not in there:
                # The steps of a pipeline appear some time after it, or never if it has ended.
                missing = RunRecord("", name, "Failed")
                if own is not None:
                    status = "Failed" if own.status in _FINAL else "NotStarted"
                    missing = replace(missing, status=status, created=own.created, ended=own.ended)
                yield slot, missing, ""

    def _without_missing(self, jobs: list[NodeJob], round_: Round, fallback_after_s: float) -> list[NodeJob]:
        """Return the jobs, of which those in the first job that Azure ML has not started are expected or ended.

        The nodes that have started are the members of the round less those of other jobs, at least the minimum.
        """
        others = sum(job.state == "running" and not job.first for job in jobs)
        if round_.state == "sealed":
            self._came = len(round_.members) - others
        self._came = max(self._came, self.shape.plan.resources.min_instance_count)
        found = []
        for job in jobs:
            if job.first and job.number:
                # One end of the first job is not as many ends in a row.
                job = replace(job, ran_s=max(job.ran_s, EARLY_S)) if job.state == "ended" else job  # noqa: PLW2901
            if job.first and job.number >= self._came and job.state == "running":
                missing = job.ran_s >= fallback_after_s
                state: JobState = "ended" if missing else "waiting"
                found.append(replace(job, name="", state=state, ran_s=max(job.ran_s, EARLY_S), ended_s=job.ran_s))
            else:
                found.append(job)
        return found

    def _claimed_job(self, name: str, *, single: bool) -> RunRecord | None:
        """Return the record of a claimed job, ``None`` if it was never submitted."""
        # A job that has ended does not change: one request less for each, in every check of a run that has lost many.
        if name in self._final:
            return self._final[name]
        record = self._workspace.record(name)
        if record is not None and not single:
            steps = self._workspace.children(name) or ()
            # Times are those of the step: a pipeline starts when it is submitted.
            step = steps[0] if steps else replace(record, status="NotStarted", started=None)
            status = record.status if record.status in _CANCELLED or (not steps and record.status in _FINAL) else None
            record = replace(step, name=name, status=status or step.status)
        if record is not None and record.status in _FINAL:
            self._final[name] = record
        return record

    def _with_state(
        self, job: NodeJob, record: RunRecord | None, timeout_s: float, refused: Mapping[str, Any] | None
    ) -> NodeJob:
        """Return the job with its state and times; ``refused`` is the row of a job that Azure ML refused."""
        now = self._workspace.now
        if refused is not None:
            return replace(job, state="ended", ended_s=_seconds(datetime.fromisoformat(refused["at"]), now))
        if record is None:
            return replace(job, state="ended") if job.first else replace(job, submitted=False)
        waiting = record.status in _WAITING
        # A waiting job that has run before was requeued, at a time that Azure ML does not report.
        again = self._requeued.setdefault(job.name, now) if waiting and record.started is not None else None
        if not waiting:
            self._requeued.pop(job.name, None)
        job = replace(
            job,
            state=_state(record.status),
            waited_s=_seconds(again or record.created, now) if waiting else 0.0,
            ran_s=_seconds(record.started, record.ended or again or now),
            ended_s=_seconds(record.ended, now),
        )
        # Azure ML itself cancels jobs at their time limit.
        return replace(job, state="ended") if job.state == "cancelled" and job.ran_s >= timeout_s else job


def _seconds(since: datetime | None, until: datetime) -> float:
    return 0.0 if since is None else max(0.0, (until - since).total_seconds())


def _state(status: str) -> JobState:
    if status in _WAITING or status in _COMING:
        return "waiting"
    if status in _CANCELLED:
        return "cancelled"
    return "ended" if status in _ENDED else "running"
