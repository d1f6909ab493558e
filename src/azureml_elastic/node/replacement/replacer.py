"""Replacement of lost nodes of a run; any number of processes may do it concurrently.

A submission is first claimed in the run's table by one insert, from which the name of the job follows. If a process
ends between claim and submission, another one completes the claim if the node is still needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from azureml_elastic.config.policies import ReplacementPolicy
from azureml_elastic.config.resources import NodePool, replacement_name
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import JobRefused, RowExists, UsageError, WorkspaceUnavailable
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.replacement.job_document import NodeSlot, replacement_job, variable_of
from azureml_elastic.node.replacement.jobs import WorkspaceJobs, developer_jobs
from azureml_elastic.node.replacement.observation import (
    CLAIM_PREFIX,
    REFUSED_PREFIX,
    STOP_PREFIX,
    Observation,
    RunObserver,
    RunShape,
)
from azureml_elastic.node.replacement.policy import NodeJob, Start, Stop, decide, limit_reached
from azureml_elastic.node.table import Table, as_developer, open_table
from azureml_elastic.plurals import counted


@dataclass(frozen=True)
class ReplacementStatus:
    """State of a run.

    Args:
        jobs: all submitted or claimed jobs of the run.
        over: ``"ended"``, ``"cancelled"`` by the owner, or ``None`` while the run is active.
        limit: limit of the policy that prevents replacement, in words, or ``None``.
        done: actions taken, in words.
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
        """Whether no node is left and none may be submitted."""
        return self.over is None and self.limit is not None and not any(job.alive for job in self.jobs)


class NodeReplacer:
    """Replacer of the lost nodes of one run.

    Args:
        first: name of the job with which the run was submitted.
        run_id: run id shared by the nodes.
        policy: policy that takes precedence over the plan's.
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
        """Return the state of the run without acting on it.

        Raises:
            PlanError: the first job does not exist or is not an elastic job.
            WorkspaceForbidden: the identity may not read jobs.
            WorkspaceUnavailable: the workspace does not answer.
            TableError: the table does not answer.
        """
        status = self._status(self._observer.observe(self._policy.fallback_after.total_seconds()))
        limit = limit_reached(status.pools, self._observer.shape.most, status.jobs, self._policy)
        return replace(status, limit=limit)

    def act(self) -> ReplacementStatus:
        """Read the state of the run, and submit and cancel jobs as needed.

        Raises as :meth:`look`. If the workspace does not answer one of the calls, the others are still made.
        """
        status = self.look()
        done: list[str] = []
        unavailable: WorkspaceUnavailable | None = None
        actions = decide(status.pools, self._observer.shape.most, status.jobs, self._policy, over=status.over)
        for action in actions:
            try:
                done.append(self._start(action, status.jobs) if isinstance(action, Start) else self._stop(action))
            except WorkspaceUnavailable as error:
                unavailable = error
        if unavailable is not None:
            raise unavailable
        return replace(status, done=tuple(text for text in done if text))

    @property
    def _policy(self) -> ReplacementPolicy:
        return self._given or self._observer.shape.plan.replacement or ReplacementPolicy()

    def _status(self, observed: Observation) -> ReplacementStatus:
        """Return the status. The row is read after the jobs, because nodes close the run before they exit."""
        row = self._table.get(ROUND_KEY)
        round_ = Round.from_value(row.value) if row is not None else Round()
        over: Literal["ended", "cancelled"] | None = "ended"
        succeeded = round_.state == "succeeded"
        if round_.closed:
            message = "The run ended successfully." if succeeded else round_.message or "The run failed."
        elif observed.cancelled:
            over, message = "cancelled", "The run was cancelled."
        elif row is None and observed.completed:
            succeeded, message = True, "A node has ended successfully, and the table has no rows of the run left."
        else:
            members = len(round_.members) if round_.state == "sealed" else 0
            over, message = None, f"Round {round_.number}: {counted(members, 'node')} in training."
        return ReplacementStatus(self._observer.shape.pools, observed.jobs, over, succeeded, message)

    def _start(self, action: Start, jobs: tuple[NodeJob, ...]) -> str:
        """Claim and submit a job; return a description, empty if another process did it."""
        shape = self._observer.shape
        stem = shape.stems[action.pool]
        name = replacement_name(self._first, stem, action.number)
        if not any(job.name == name for job in jobs):
            claim = {"first": self._first, "stem": stem, "number": action.number, "why": action.why}
            try:
                # The insert decides which process submits. It comes first: a job without a claim would be submitted
                # twice, while a claim without a job is completed by the next check of any process.
                self._table.insert(CLAIM_PREFIX + name, claim)
            except RowExists:
                return ""
        properties = replacement_job(
            shape.document,
            shape.plan,
            NodeSlot(action.pool, action.number),
            first=self._first,
            run_id=self._run_id,
            workspace=self._workspace.workspace,
        )
        try:
            made = self._workspace.submit(name, properties)
        except JobRefused as error:
            with contextlib.suppress(RowExists):
                refusal = {"at": self._workspace.now.isoformat(), "why": str(error)}
                self._table.insert(REFUSED_PREFIX + name, refusal)
            return str(error)
        return f"submitted {name}: {action.why}" if made else ""

    def _stop(self, action: Stop) -> str:
        name = action.job.name
        with contextlib.suppress(RowExists):
            # Before the request: a cancelled job without this row would look like one that the owner has cancelled,
            # which ends the run once all are.
            self._table.insert(STOP_PREFIX + name, {"why": action.why})
        self._workspace.cancel(name)
        return f"cancelled {name}: {action.why}"


@contextlib.contextmanager
def open_replacer(
    environment: NodeEnvironment, first: str, changes: Mapping[str, Any]
) -> Iterator[tuple[NodeReplacer, ReplacementPolicy]]:
    """Open the table of a run and yield its replacer and the policy in effect.

    Args:
        first: name of the run's first job, or of a job that brought it a node.
        changes: fields of the policy that override the plan's.

    Raises:
        PlanError: the job does not exist or is not an elastic job.
        UsageError: the table cannot be opened.
        WorkspaceForbidden: the login may not read jobs.
        WorkspaceUnavailable: the workspace does not answer.
        MissingExtra: azure-identity is not installed.
    """
    jobs = developer_jobs(environment)
    shape = RunShape.read(jobs, first)
    if (earlier := variable_of(shape.document, variables.FIRST_JOB)) is not None:
        first, shape = earlier, RunShape.read(jobs, earlier)
    plan = shape.plan
    policy = ReplacementPolicy.model_validate({**dict(plan.replacement or ReplacementPolicy()), **changes})
    if policy.budget is not None and not (plan.pools and all(pool.price_per_hour is not None for pool in plan.pools)):
        raise UsageError(
            f"A budget of {policy.budget:g} USD needs the price of every node pool, and the run {first!r} was "
            "submitted without. Limit it by --max-replacements instead."
        )
    given = {name: variable_of(shape.document, name) or "" for name in (variables.RUN_ID, variables.STEP)}
    run_id = plan.run_id_of(given, job=first, root=first) or first
    table = open_table(as_developer(plan.rendezvous), run_id, environment)
    try:
        yield NodeReplacer(jobs, table, first, run_id, policy), policy
    finally:
        table.close()
