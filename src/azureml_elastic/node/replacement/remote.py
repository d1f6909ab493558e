"""Replacement of nodes by a process outside the run, with the login of the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from azureml_elastic.config import environment as variables
from azureml_elastic.config.replacement import ReplacementPolicy
from azureml_elastic.errors import UsageError
from azureml_elastic.node.azure.credentials import developer_credential
from azureml_elastic.node.replacement.job_document import variable_of
from azureml_elastic.node.replacement.jobs import WorkspaceJobs, workspace_id
from azureml_elastic.node.replacement.observation import RunShape
from azureml_elastic.node.replacement.replacer import NodeReplacer
from azureml_elastic.node.table import open_table

__all__ = ["open_replacer"]


@contextlib.contextmanager
def open_replacer(
    environ: Mapping[str, str], first: str, changes: Mapping[str, Any]
) -> Iterator[tuple[NodeReplacer, ReplacementPolicy]]:
    """Open the table of a run and yield its replacer and the policy in effect.

    Args:
        environ: environment of this process, with the variables that name the workspace.
        first: name of the run's first job, or of a job that brought it a node.
        changes: fields of the policy that override the plan's.

    Raises:
        PlanError: the job does not exist or is not an elastic job.
        UsageError: the table cannot be opened.
        WorkspaceForbidden: the login may not read jobs.
        WorkspaceUnavailable: the workspace does not answer.
        MissingExtra: azure-identity is not installed.
    """
    token = developer_credential().token
    assert token is not None
    jobs = WorkspaceJobs(workspace_id(environ), token)
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
    run_id = variable_of(shape.document, variables.RUN_ID) or plan.run_id or first
    # The plan's credential is that of the nodes; this process uses the user's login.
    rendezvous = plan.distribution.rendezvous
    if rendezvous.credential != "connection_string":
        rendezvous = rendezvous.model_copy(update={"credential": "developer", "client_id": None})
    table = open_table(rendezvous, run_id, environ)
    try:
        yield NodeReplacer(jobs, table, first, run_id, policy), policy
    finally:
        table.close()
