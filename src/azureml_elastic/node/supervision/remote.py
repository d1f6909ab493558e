"""A supervisor that is no node of the run: on somebody's own machine, with their own login."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from azureml_elastic.errors import MissingExtra, PlanError
from azureml_elastic.node.supervision.jobs import WorkspaceJobs, workspace_id
from azureml_elastic.node.supervision.replacement import plan_of, run_of
from azureml_elastic.node.supervision.supervisor import Supervisor
from azureml_elastic.node.table import open_table
from azureml_elastic.spec.supervision import SupervisionPolicy

__all__ = ["open_supervisor"]


@contextlib.contextmanager
def open_supervisor(
    environ: Mapping[str, str], first: str, changes: Mapping[str, Any]
) -> Iterator[tuple[Supervisor, SupervisionPolicy]]:
    """Open the run's table, and give the supervisor with the policy that it follows.

    Args:
        environ: of this process, with the variables that name the workspace.
        first: name of the job with which the run was submitted.
        changes: fields of the policy, before those of the plan.

    Raises:
        PlanError: there is no such job, or it is no elastic one.
        UsageError: the table cannot be opened.
        WorkspaceForbidden: the login may not read jobs.
        WorkspaceUnavailable: the workspace does not answer.
        MissingExtra: azure-identity is not installed.
    """
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise MissingExtra("azure-identity", "node") from error
    jobs = WorkspaceJobs(workspace_id(environ), DefaultAzureCredential())
    document = jobs.document(first)
    if document is None:
        raise PlanError(f"The workspace has no job {first!r}. Give the name of the job that was submitted.")
    plan = plan_of(document)
    policy = SupervisionPolicy.model_validate({**dict(plan.supervision or SupervisionPolicy()), **changes})
    run_id = run_of(document) or plan.run_id or first
    # The nodes' identity is theirs; here whoever is logged in opens the table.
    rendezvous = plan.distribution.rendezvous.model_copy(update={"credential": "auto", "client_id": None})
    table = open_table(rendezvous, run_id, environ)
    try:
        yield Supervisor(jobs, table, first, run_id, policy), policy
    finally:
        table.close()
