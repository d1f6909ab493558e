"""The MLflow run that the workers of all nodes log to.

Azure ML sets ``MLFLOW_RUN_ID`` to the job that a process belongs to. Where every node is a job of its own, rank 0 moves
from job to job with each change of the round, and its metrics would be spread over all of them.

Workers find the common run in ``AZUREML_RUN_ID``, too: azureml-mlflow leaves the status of the run that this variable
names to the service, whereas the end of a script's ``with mlflow.start_run()`` sets the status of any other run.
"""

from __future__ import annotations

from collections.abc import Mapping

from azureml_elastic.config import Plan
from azureml_elastic.environment import names as variables

__all__ = ["tracked_run_variables"]

_MLFLOW_RUN = "MLFLOW_RUN_ID"
_JOB = "AZUREML_RUN_ID"
_ROOT = "AZUREML_ROOT_RUN_ID"


def tracked_run_variables(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let the workers of all nodes log to one run: that of the run's first job.

    Empty where the nodes share a job, outside Azure ML, and where the command has set another run.

    Args:
        plan: plan of the run.
        environ: environment of the agent.
    """
    job = environ.get(_JOB)
    if not job or environ.get(_MLFLOW_RUN) != job:
        return {}
    root = environ.get(_ROOT) if plan.resources.effective_placement == "fan_out" else None
    run = environ.get(variables.FIRST_JOB) or root or job
    return {} if run == job else {_MLFLOW_RUN: run, _JOB: run}
