"""Looks at a run's jobs, decides, and does it. Any number of supervisors may do so at once.

What is to be submitted is claimed in the run's table first, by one insert. The name of the job follows from the claim,
so that a supervisor that dies between the two leaves nothing but a job that the next one submits under that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from azureml_elastic.errors import PlanError, RowExists
from azureml_elastic.node.rendezvous.keys import ROUND_KEY
from azureml_elastic.node.rendezvous.round import Round
from azureml_elastic.node.supervision.jobs import RunRecord, WorkspaceJobs
from azureml_elastic.node.supervision.policy import JobState, NodeJob, Start, Stop, decide
from azureml_elastic.node.supervision.replacement import SINGLE, Place, place_of, plan_of, replacement
from azureml_elastic.node.table import Table
from azureml_elastic.spec.plan import Plan
from azureml_elastic.spec.pools import NodePool, replacement_name, step_names
from azureml_elastic.spec.supervision import CANCELLED_TAG, SupervisionPolicy

__all__ = ["Outlook", "Supervisor"]

_CLAIM_PREFIX = "job."
_STOP_PREFIX = "stop."

_WAITING = frozenset({"NotStarted", "Queued", "Provisioning", "Paused"})
_COMING = frozenset({"Preparing", "Starting"})
"""It has a machine, and is waited for no longer."""
_ENDED = frozenset({"Completed", "Failed"})
_CANCELLED = frozenset({"CancelRequested", "Canceled"})


@dataclass(frozen=True)
class Outlook:
    """How a run stands.

    Args:
        pools: of the run.
        jobs: all that were submitted for it.
        over: whether it has ended, or its owner has cancelled it; ``None`` while it is on.
        succeeded: whether it has ended well.
        message: why it failed, or what has happened to it.
        done: what was done about it, in words.
    """

    pools: tuple[NodePool, ...]
    jobs: tuple[NodeJob, ...]
    over: Literal["ended", "cancelled"] | None
    succeeded: bool
    message: str
    done: tuple[str, ...] = ()


class Supervisor:
    """Supervises one run.

    Args:
        jobs: of the workspace.
        table: opened for the run.
        first: name of the job with which the run was submitted.
        run_id: that the nodes share.
        policy: before that of the plan.
    """

    def __init__(
        self, jobs: WorkspaceJobs, table: Table, first: str, run_id: str, policy: SupervisionPolicy | None = None
    ) -> None:
        self._workspace = jobs
        self._table = table
        self._first = first
        self._run_id = run_id
        self._given = policy
        self._document: dict[str, Any] | None = None
        self._ended: dict[str, RunRecord] = {}

    def look(self) -> Outlook:
        """Return how the run stands; do nothing about it.

        Raises:
            PlanError: the first job is not there, or not ours.
            WorkspaceForbidden: the identity may not read jobs.
            WorkspaceUnavailable: the workspace does not answer.
            TableError: the table does not answer.
        """
        plan, document = self._plan()
        pools, stems, most = _shape(plan, document)
        claims = {row.key.removeprefix(_CLAIM_PREFIX): row.value for row in self._table.query(_CLAIM_PREFIX)}
        stopped = frozenset(row.key.removeprefix(_STOP_PREFIX) for row in self._table.query(_STOP_PREFIX))
        own = self._workspace.record(self._first)
        jobs = [
            self._job(Place(*place), record, stopped, first=True)
            for place, record in self._first_jobs(plan, document, own)
        ]
        for name, claim in claims.items():
            if claim.get("first") == self._first:
                place = Place(stems.index(str(claim["stem"])), int(claim["number"]))
                jobs.append(self._later_job(name, place, stopped))
        cancelled = own is not None and (own.status in _CANCELLED or CANCELLED_TAG in own.tags)
        cancelled = cancelled or sum(job.state == "cancelled" and not job.stopped for job in jobs) >= most
        return self._outlook(pools, tuple(jobs), cancelled=cancelled)

    def act(self) -> Outlook:
        """Look at the run, and do what is to be done about it.

        Raises:
            PlanError: the first job is not there, or not ours.
            WorkspaceForbidden: the identity may not read, submit or cancel jobs.
            WorkspaceUnavailable: the workspace does not answer, or refuses a job.
            TableError: the table does not answer.
        """
        outlook = self.look()
        plan, document = self._plan()
        pools, stems, most = _shape(plan, document)
        policy = self._given or plan.supervision or SupervisionPolicy()
        done = [self._submit(Place(job.pool, job.number), stems) for job in outlook.jobs if not job.name]
        for action in decide(pools, most, outlook.jobs, policy, over=outlook.over):
            if isinstance(action, Start):
                done.append(self._start(action, stems))
            else:
                done.append(self._stop(action))
        return replace(outlook, done=tuple(text for text in done if text))

    def _plan(self) -> tuple[Plan, Mapping[str, Any]]:
        if self._document is None:
            self._document = self._workspace.document(self._first)
            if self._document is None:
                raise PlanError(
                    f"The workspace has no job {self._first!r}. Give the name of the job that was submitted."
                )
        return plan_of(self._document), self._document

    def _first_jobs(
        self, plan: Plan, document: Mapping[str, Any], own: RunRecord | None
    ) -> list[tuple[tuple[int, int], RunRecord]]:
        if _is_single(document):
            return [] if own is None else [((0, 0), own)]
        found = []
        for record in self._workspace.children(self._first) or ():
            place = place_of(record.display_name, plan)
            if place is not None:
                found.append(((place.pool, place.number), record))
        # Azure ML makes the steps of a pipeline some time after the pipeline.
        there = {place for place, _ in found}
        for name in document.get("jobs") or {}:
            place = place_of(name, plan)
            if place is not None and (place.pool, place.number) not in there:
                found.append(((place.pool, place.number), RunRecord(name, name, "NotStarted", 0.0, 0.0, 0.0)))
        return found

    def _later_job(self, name: str, place: Place, stopped: frozenset[str]) -> NodeJob:
        """Return the job of a claim; without a name where it was never submitted."""
        record = self._ended.get(name)
        if record is None:
            own = self._workspace.record(name)
            if own is None:
                return NodeJob(place.pool, place.number, "", "waiting", first=False)
            steps = () if _is_single(self._plan()[1]) else self._workspace.children(name) or ()
            # A step that was cancelled or has ended counts, whatever its pipeline makes of it.
            record = replace(steps[0], name=name) if steps and own.status not in _CANCELLED else own
            if record.status in _ENDED:
                self._ended[name] = record
        return self._job(place, replace(record, name=name), stopped, first=False)

    def _job(self, place: Place, record: RunRecord, stopped: frozenset[str], *, first: bool) -> NodeJob:
        return NodeJob(
            place.pool,
            place.number,
            record.name,
            _state(record.status),
            first=first,
            waited_s=record.waited_s if record.status in _WAITING else 0.0,
            ran_s=record.ran_s,
            ended_s=record.ended_s,
            stopped=record.name in stopped,
        )

    def _outlook(self, pools: tuple[NodePool, ...], jobs: tuple[NodeJob, ...], *, cancelled: bool) -> Outlook:
        """Return the outlook; the row is read last, for a node that ends well has closed the run before."""
        row = self._table.get(ROUND_KEY)
        round_ = Round.from_value(row.value) if row is not None else Round()
        if round_.closed:
            succeeded = round_.state == "succeeded"
            message = "The run ended well." if succeeded else round_.message or "The run failed."
            return Outlook(pools, jobs, over="ended", succeeded=succeeded, message=message)
        if cancelled:
            return Outlook(pools, jobs, over="cancelled", succeeded=False, message="The run was cancelled.")
        members = len(round_.members) if round_.state == "sealed" else 0
        message = f"Round {round_.number}: {members} nodes train."
        return Outlook(pools, jobs, over=None, succeeded=False, message=message)

    def _start(self, action: Start, stems: tuple[str, ...]) -> str:
        name = replacement_name(self._first, stems[action.pool], action.number)
        claim = {"first": self._first, "stem": stems[action.pool], "number": action.number, "why": action.why}
        try:
            self._table.insert(_CLAIM_PREFIX + name, claim)
        except RowExists:
            return ""  # another supervisor does it
        return f"{self._submit(Place(action.pool, action.number), stems)}: {action.why}"

    def _submit(self, place: Place, stems: tuple[str, ...]) -> str:
        plan, document = self._plan()
        name = replacement_name(self._first, stems[place.pool], place.number)
        properties = replacement(
            document, plan, place, first=self._first, run_id=self._run_id, workspace=self._workspace.workspace
        )
        self._workspace.submit(name, properties)
        return f"submitted {name}"

    def _stop(self, action: Stop) -> str:
        name = action.job.name
        with contextlib.suppress(RowExists):  # the cancellation may have been lost, and does no harm twice
            self._table.insert(_STOP_PREFIX + name, {"why": action.why})
        self._workspace.cancel(name)
        return f"cancelled {name}: {action.why}"


def _shape(plan: Plan, document: Mapping[str, Any]) -> tuple[tuple[NodePool, ...], tuple[str, ...], int]:
    """Return the pools, how the names of their nodes begin, and the most nodes.

    A single job, however many nodes it has, is one node of one pool.
    """
    if _is_single(document):
        return (NodePool("compute", max_instance_count=1),), (SINGLE,), 1
    most = plan.resources.max_instance_count
    pools = plan.pools or (NodePool("compute", max_instance_count=most),)
    return pools, step_names(plan.pools), most


def _is_single(document: Mapping[str, Any]) -> bool:
    return document.get("jobType") != "Pipeline"


def _state(status: str) -> JobState:
    if status in _WAITING or status in _COMING:
        return "waiting"
    if status in _CANCELLED:
        return "cancelled"
    return "ended" if status in _ENDED else "running"
