"""A submitted run in the workspace of an ``MLClient``.

The earlier run that a job continues is checked with the workspace before anything is uploaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from azureml_elastic.config.policies import CANCELLED_TAG
from azureml_elastic.errors import SubmitError
from azureml_elastic.plurals import counted
from azureml_elastic.submit.client import first_line
from azureml_elastic.submit.run import TERMINAL, ElasticRun, JobRecord

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

    from azureml_elastic.submit.job import ElasticCommandJob


class SubmittedRun(ElasticRun):
    """A run that was submitted as an elastic job.

    Args:
        name: name of the submitted job, or of the job of a replacement node.

    Raises:
        SubmitError: there is no such job, or it is not an elastic job.
    """

    def __init__(self, client: MLClient, name: str) -> None:
        self._client = client
        super().__init__(_ClientJobs(client), name)

    def cancel(self, cancelling: Callable[[str], object] = lambda _: None) -> None:
        """Cancel all jobs of the run.

        A first job that has ended cannot be cancelled any more; it is tagged, so that its nodes are not replaced.

        Args:
            cancelling: callback with the name of each job that is being cancelled.

        Raises:
            SubmitError: a job could not be cancelled, or the first one not be tagged; all others were.
        """
        problems: list[str] = []
        if self.status in ("Failed", "Canceled"):
            self._tag(problems)
        for name in self.jobs:
            with _collected(problems, name):
                if _status(self._client.jobs.get(name)) not in TERMINAL:
                    self._client.jobs.begin_cancel(name)
                    cancelling(name)
        # It may have failed before it could be cancelled.
        if self.status == "Running" and _status(self._client.jobs.get(self.name)) == "Failed":
            self._tag(problems)
        if problems:
            raise SubmitError(
                f"Not all jobs of {self.name} could be cancelled ({'; '.join(problems)}). Try again, and "
                "stop every 'azureml-elastic replace-nodes' of the run, which might submit nodes again."
            )

    def _tag(self, problems: list[str]) -> None:
        """Tag the first job as cancelled. azure-ai-ml before 1.35 uploads the whole job."""
        with _collected(problems, f"{self.name} could not be tagged as cancelled"):
            job: Any = self._client.jobs.get(self.name)
            job.tags = {**(job.tags or {}), CANCELLED_TAG: "true"}
            self._client.jobs.create_or_update(job)


class _ClientJobs:
    """The jobs of the workspace of an ``MLClient``."""

    def __init__(self, client: MLClient) -> None:
        self._client = client

    def job(self, name: str) -> JobRecord | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return _record(self._client.jobs.get(name))
        except ResourceNotFoundError:
            return None

    def steps(self, name: str) -> Sequence[JobRecord]:
        return [_record(job) for job in self._client.jobs.list(parent_job_name=name)]


def _record(job: Any) -> JobRecord:
    pipeline = job.type == "pipeline"
    holders = list((getattr(job, "jobs", None) or {}).values()) if pipeline else [job]
    return JobRecord(
        str(job.name),
        _status(job),
        display_name=str(job.display_name or ""),
        pipeline=pipeline,
        variables=tuple(getattr(holder, "environment_variables", None) or {} for holder in holders),
        studio_url=job.studio_url,
    )


def _status(job: Any) -> str:
    return str(getattr(job.status, "value", job.status))


@contextlib.contextmanager
def _collected(problems: list[str], action: str) -> Iterator[None]:
    """Append errors of Azure's packages to a list instead of raising them."""
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError

    try:
        yield
    except (AzureError, MlException) as error:
        problems.append(f"{action}: {first_line(error)}")


def check_earlier_run(client: MLClient, job: ElasticCommandJob) -> ElasticCommandJob:
    """Return a job that continues an earlier run by its run id, whichever of the run's jobs was named.

    A job that continues no run is returned as it is.

    Raises:
        SubmitError: the earlier run does not exist, is no elastic job, still runs, or has another checkpoint path.
    """
    name = job.resume_from
    if name is None:
        return job
    try:
        earlier = SubmittedRun(client, name)
    except SubmitError as error:
        raise SubmitError(f"resume_from={name!r}: {error}") from error
    active = [node for node in earlier.nodes() if node.active]
    if active:
        raise SubmitError(
            f"resume_from={name!r}: that run still has {counted(len(active), 'active node')}, {active[0].node} is "
            f"{active[0].status}. Wait for its end, or cancel it first: azureml-elastic cancel {earlier.name}"
        )
    theirs, own = earlier.checkpoint_path, job.checkpoint.path
    if theirs != own:
        raise SubmitError(
            f"resume_from={name!r}: that run has its checkpoints below {theirs or 'the default path'!r}, and this job "
            f"below {own or 'the default path'!r}. Give the job CheckpointPolicy(path={theirs!r})."
        )
    return job.with_options(resume_from=earlier.run_id)
