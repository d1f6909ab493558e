"""``azureml-elastic submit --local``: a job file in a workspace on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_elastic.cli.failures import require

if TYPE_CHECKING:
    from azureml_elastic import ElasticCommandJob
    from azureml_elastic.testing import Pool

__all__ = ["run_locally"]

_FEWEST_MACHINES = 8


def run_locally(
    job_file: Path,
    overrides: Sequence[str],
    *,
    evict: Sequence[str],
    pools: Sequence[str],
    run_dir: Path | None,
    live: bool | None,
) -> None:
    """Run a job file in a local workspace that exists for this run, and exit with 0 if the run succeeded.

    Args:
        job_file: YAML file.
        overrides: values to set in the file first.
        evict: evictions, such as ``1@step:30``.
        pools: computes, such as ``spot=2``; by default those that the job names have as many machines as it needs.
        run_dir: new folder for the run's files; ``None`` for one below ``./runs``.
        live: whether to show a live table; ``None`` for what the terminal supports.
    """
    require(("azure.ai.ml", "azure-ai-ml", "submit"), ("torch", "torch", "node"), ("psutil", "psutil", "node"))

    from rich.console import Console

    from azureml_elastic.local.cluster import new_run_dir
    from azureml_elastic.local.run_end import command_exit_code
    from azureml_elastic.local.view import choose_view
    from azureml_elastic.report.terminal import summary
    from azureml_elastic.submit.client import readable_errors
    from azureml_elastic.submit.resumption import check_earlier_run
    from azureml_elastic.submit.yaml.job_file import load_elastic_job
    from azureml_elastic.testing import LocalWorkspace
    from azureml_elastic.testing.jobs.machines import parse_eviction, parse_pool

    evictions = [parse_eviction(text) for text in evict]
    given = dict(map(parse_pool, pools))
    job = load_elastic_job(job_file, overrides)
    console = Console()
    machines = {**_pools_of(job), **given}
    with LocalWorkspace(pools=machines, evictions=evictions) as workspace, readable_errors(f"run {job_file}"):
        job = check_earlier_run(workspace.ml_client, job)
        report = workspace.run(job, run_dir or new_run_dir(), choose_view(console, live=live))
    console.print(summary(report))
    sys.exit(command_exit_code(report))


def _pools_of(job: ElasticCommandJob) -> Mapping[str, Pool]:
    """Return the computes that a job names, each with machines for all nodes that the job may request there."""
    from azureml_elastic.testing import Pool

    most = max(_FEWEST_MACHINES, job.resources.max_instance_count)
    names = [pool.compute for pool in job.pools] or [str(job.compute or "serverless")]
    return {name.removeprefix("azureml:").rpartition("/")[2]: Pool(nodes=most) for name in names}
