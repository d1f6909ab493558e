"""Looks at a run's jobs, decides, and does it. Any number of supervisors may do so at once.

What is to be submitted is claimed in the run's table first, by one insert. The name of the job follows from the claim,
so that a supervisor that dies between the two leaves nothing but a claim that the next one follows up, if such a node
is still wanted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Literal

from azureml_elastic.config.replacement import ReplacementPolicy
from azureml_elastic.config.resources import NodePool, replacement_name
from azureml_elastic.errors import JobRefused, RowExists, WorkspaceUnavailable
from azureml_elastic.node.rendezvous.state.round import Round
from azureml_elastic.node.rendezvous.state.row_keys import ROUND_KEY
from azureml_elastic.node.replacement.job_document import NodeSlot, replacement_job
from azureml_elastic.node.replacement.jobs import WorkspaceJobs
from azureml_elastic.node.replacement.observation import (
    CLAIM_PREFIX,
    REFUSED_PREFIX,
    STOP_PREFIX,
    Observation,
    RunObserver,
)
from azureml_elastic.node.replacement.policy import NodeJob, Start, Stop, decide, limit_reached
from azureml_elastic.node.table import Table

__all__ = ["NodeReplacer", "ReplacementStatus"]


@dataclass(frozen=True)
class ReplacementStatus:
    """How a run stands.

    Args:
        pools: of the run.
        jobs: all that were submitted or claimed for it.
        over: whether it has ended, or its owner has cancelled it; ``None`` while it is on.
        succeeded: whether it has ended well.
        message: why it failed, or what has happened to it.
        limit: of the policy that keeps lost nodes from being replaced, in words; ``None`` for none.
        done: what was done about it, in words.
    """

    pools: tuple[NodePool, ...]
    jobs: tuple[NodeJob, ...]
    over: Literal["ended", "cancelled"] | None
    succeeded: bool
    message: str
    limit: str | None = None
    done: tuple[str, ...] = ()

    @property
    def hopeless(self) -> bool:
        """Whether no node is left and none may be asked for."""
        living = any(job.submitted and job.state in ("waiting", "running") for job in self.jobs)
        return self.over is None and self.limit is not None and not living


class NodeReplacer:
    """Supervises one run.

    Args:
        jobs: of the workspace.
        table: opened for the run.
        first: name of the job with which the run was submitted.
        run_id: that the nodes share.
        policy: before that of the plan.
    """

    def __init__(
        self, jobs: WorkspaceJobs, table: Table, first: str, run_id: str, policy: ReplacementPolicy | None = None
    ) -> None:
        self._workspace = jobs
        self._table = table
        self._first = first
        self._run_id = run_id
        self._given = policy
        self._observer = RunObserver(jobs, table, first)

    def look(self) -> ReplacementStatus:
        """Return how the run stands; do nothing about it.

        Raises:
            PlanError: the first job is not there, or not ours.
            WorkspaceForbidden: the identity may not read jobs.
            WorkspaceUnavailable: the workspace does not answer.
            TableError: the table does not answer.
        """
        outlook = self._outlook(self._observer.look())
        shape = self._observer.shape
        return replace(outlook, limit=limit_reached(outlook.pools, shape.most, outlook.jobs, self._policy))

    def act(self) -> ReplacementStatus:
        """Look at the run, and do what is to be done about it.

        Raises:
            PlanError: the first job is not there, or not ours.
            WorkspaceForbidden: the identity may not read, submit or cancel jobs.
            WorkspaceUnavailable: the workspace did not answer one of the calls; the others were made.
            TableError: the table does not answer.
        """
        outlook = self.look()
        done: list[str] = []
        away: WorkspaceUnavailable | None = None
        actions = decide(outlook.pools, self._observer.shape.most, outlook.jobs, self._policy, over=outlook.over)
        for action in actions:
            try:
                done.append(self._start(action, outlook.jobs) if isinstance(action, Start) else self._stop(action))
            except WorkspaceUnavailable as error:
                away = error
        if away is not None:
            raise away
        return replace(outlook, done=tuple(text for text in done if text))

    @property
    def _policy(self) -> ReplacementPolicy:
        return self._given or self._observer.shape.plan.replacement or ReplacementPolicy()

    def _outlook(self, seen: Observation) -> ReplacementStatus:
        """Return the outlook; the row is read last, for a node that ends well has closed the run before."""
        pools, jobs = self._observer.shape.pools, seen.jobs
        row = self._table.get(ROUND_KEY)
        round_ = Round.from_value(row.value) if row is not None else Round()
        if round_.closed:
            succeeded = round_.state == "succeeded"
            message = "The run ended well." if succeeded else round_.message or "The run failed."
            return ReplacementStatus(pools, jobs, over="ended", succeeded=succeeded, message=message)
        if seen.cancelled:
            return ReplacementStatus(pools, jobs, over="cancelled", succeeded=False, message="The run was cancelled.")
        if row is None and seen.completed:
            message = "A node has ended well, and nothing is left of the run in its table."
            return ReplacementStatus(pools, jobs, over="ended", succeeded=True, message=message)
        members = len(round_.members) if round_.state == "sealed" else 0
        message = f"Round {round_.number}: {members} nodes train."
        return ReplacementStatus(pools, jobs, over=None, succeeded=False, message=message)

    def _start(self, action: Start, jobs: tuple[NodeJob, ...]) -> str:
        shape = self._observer.shape
        name = replacement_name(self._first, shape.stems[action.pool], action.number)
        if not any(job.name == name for job in jobs):
            claim = {"first": self._first, "stem": shape.stems[action.pool], "number": action.number}
            try:
                self._table.insert(CLAIM_PREFIX + name, {**claim, "why": action.why})
            except RowExists:
                return ""  # another supervisor does it
        place = NodeSlot(action.pool, action.number)
        properties = replacement_job(
            shape.document,
            shape.plan,
            place,
            first=self._first,
            run_id=self._run_id,
            workspace=self._workspace.workspace,
        )
        try:
            made = self._workspace.submit(name, properties)
        except JobRefused as error:
            with contextlib.suppress(RowExists):
                at = self._workspace.now.isoformat()
                self._table.insert(REFUSED_PREFIX + name, {"at": at, "why": str(error)})
            return str(error)
        return f"submitted {name}: {action.why}" if made else ""

    def _stop(self, action: Stop) -> str:
        name = action.job.name
        with contextlib.suppress(RowExists):
            self._table.insert(STOP_PREFIX + name, {"why": action.why})
        self._workspace.cancel(name)
        return f"cancelled {name}: {action.why}"
