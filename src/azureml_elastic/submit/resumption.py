"""Checks of the earlier run that a job continues, made with the workspace before anything is uploaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_elastic.errors import SubmitError
from azureml_elastic.plurals import counted
from azureml_elastic.submit.job import ElasticCommandJob
from azureml_elastic.submit.submitted import SubmittedRun

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

__all__ = ["check_earlier_run"]


def check_earlier_run(client: MLClient, job: ElasticCommandJob) -> ElasticCommandJob:
    """Return a job that continues an earlier run by its run id, whichever of the run's jobs was named.

    A job that continues no run is returned as it is.

    Args:
        client: client of the workspace.
        job: job to be submitted.

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
