"""Commands about job files: ``compile``, ``validate``, ``submit`` and ``schema``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from azureml_elastic.cli.failures import CONTINUES, explained, message_of, require
from azureml_elastic.cli.local import LiveOption, RunFolder, named_folder, say_how_to_go_on
from azureml_elastic.cli.output import JsonOption, console_beside, write_json
from azureml_elastic.cli.workspace import EvictOption, PoolOption
from azureml_elastic.cli.workspaces import current_workspace
from azureml_elastic.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from azure.ai.ml.entities import PipelineJob, Sweep

    from azureml_elastic.submit import ElasticCommandJob
    from azureml_elastic.testing import Pool

_FEWEST_MACHINES = 8

JobFile = Annotated[Path, typer.Argument(help="The YAML file of the job, with its elastic: block.", metavar="JOB.YML")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set a value of the file first, as in --set elastic.max_instance_count=12. May be repeated.",
        metavar="PATH=VALUE",
    ),
]


def run_locally(
    job_file: Path,
    overrides: Sequence[str],
    *,
    evict: Sequence[str],
    pools: Sequence[str],
    run_dir: Path | None,
    live: bool | None,
) -> None:
    """Run a job file in a local workspace that exists for this run, and exit with 0 if the run succeeded."""
    require(("azure.ai.ml", "azure-ai-ml", "submit"), ("torch", "torch", "node"), ("psutil", "psutil", "node"))

    from rich.console import Console

    from azureml_elastic.local.cluster import new_run_dir
    from azureml_elastic.local.run_end import command_exit_code
    from azureml_elastic.local.view import choose_view
    from azureml_elastic.report.terminal import summary
    from azureml_elastic.submit.client import readable_errors
    from azureml_elastic.submit.submitted import check_earlier_run
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
        run_dir = run_dir or new_run_dir()
        with named_folder(console, run_dir):
            report = workspace.run(job, run_dir, choose_view(console, live=live))
    console.print(summary(report))
    if report.outcome != "succeeded":
        say_how_to_go_on(run_dir)
    sys.exit(command_exit_code(report))


def _pools_of(job: ElasticCommandJob) -> Mapping[str, Pool]:
    """Return the computes that a job names, each with machines for all nodes that the job may request there."""
    from azureml_elastic.testing import Pool

    most = max(_FEWEST_MACHINES, job.resources.max_instance_count)
    names = [pool.compute for pool in job.pools] or [str(job.compute or "serverless")]
    return {name.removeprefix("azureml:").rpartition("/")[2]: Pool(nodes=most) for name in names}


@explained()
def compile_(
    job_file: JobFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; by default the text is printed.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Write JOB.YML as standard YAML, for 'az ml job create -f' and azure-ai-ml's load_job.

    Sends no request. With --output, paths are relative to its folder, and the library for the nodes is written beside.
    """
    from azureml_elastic.submit.yaml.compiled_file import compile_file

    compiled = compile_file(job_file, output, overrides or ())
    if output is None:
        typer.echo(compiled.text, nl=False)
        return
    typer.echo(f"Wrote {output}. Submit it with: az ml job create -f {output}", err=True)
    if compiled.runtime is not None:
        done = "Wrote" if compiled.runtime_changed else "Kept, unchanged,"
        typer.echo(
            f"{done} {output.parent / compiled.runtime.name}, which goes to the nodes: keep both together.", err=True
        )


@explained()
def validate(job_file: JobFile, overrides: Overrides = None, json: JsonOption = None) -> None:
    """Check JOB.YML and all that it names on this machine, without a request; exit with 0 if it can be submitted."""
    from azureml_elastic.submit.yaml.compiled_file import compile_file

    try:
        compile_file(job_file, None, overrides or ())
    except (ElasticError, ValidationError) as error:
        write_json({"result": "Failed", "errors": [{"message": message_of(error)}]}, json)
        raise
    console_beside(json).print(f"{job_file} can be submitted.", soft_wrap=True, highlight=False, markup=False)
    write_json({"result": "Succeeded", "errors": []}, json)


@explained(CONTINUES)
def submit(
    job_file: JobFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the compiled job without sending a request.")
    ] = False,
    resume_from: Annotated[
        str | None,
        typer.Option(help="Continue an ended run, such as a failed one, from its last checkpoint.", metavar="RUN"),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show the run until it ends.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Run the job in a workspace on this machine, which is closed afterwards.")
    ] = False,
    evict: EvictOption = None,
    pool: PoolOption = None,
    run_dir: RunFolder = None,
    live: LiveOption = None,
) -> None:
    """Submit JOB.YML; prints the name of the run, for the other commands.

    The workspace is given by the options, by Azure ML's environment variables, or by config.json. The login is that
    of azure-identity: az login, the environment variables of a service principal, or a managed identity.

    With --local nothing is sent to Azure: the nodes run on this machine, are shown until the run ends, and leave a
    report, logs and outputs in a folder.
    """
    from azureml_elastic.submit.client import connect, readable_errors

    _check_combination(local=local, evict=evict, pool=pool, run_dir=run_dir, dry_run=dry_run, stream=stream)
    if resume_from is not None:
        _refuse_several_runs(job_file, overrides or (), resume_from)
        # In quotes, as YAML would read the name of a run that has digits alone as a number.
        overrides = [*(overrides or ()), f"elastic.resume_from={dumps(resume_from)}"]
    if dry_run:
        from azureml_elastic.submit.yaml.compiled_file import compile_file

        typer.echo(compile_file(job_file, None, overrides or ()).text, nl=False)
        return
    if local:
        run_locally(job_file, overrides or (), evict=evict or (), pools=pool or (), run_dir=run_dir, live=live)
        return
    from azureml_elastic.submit.submitted import check_earlier_run
    from azureml_elastic.submit.yaml.job_file import load_elastic_job, load_elastic_sweep, read_document
    from azureml_elastic.submit.yaml.pipeline_file import load_elastic_pipeline
    from azureml_elastic.submit.yaml.yaml_terms import translated_errors

    kind = read_document(job_file, overrides or ()).get("type")
    name = current_workspace()
    client = connect(name.subscription, name.group, name.name)
    job: ElasticCommandJob | PipelineJob | Sweep
    if kind == "sweep":
        job = load_elastic_sweep(job_file, overrides or ())
    elif kind == "pipeline":
        job = load_elastic_pipeline(job_file, overrides or ())
    else:
        job = load_elastic_job(job_file, overrides or ())
        with readable_errors(f"read the run {job.resume_from!r}"):
            job = check_earlier_run(client, job)
    with translated_errors(), readable_errors(f"submit {job_file}"):
        submitted = client.jobs.create_or_update(job)
    typer.echo(submitted.name)
    if submitted.studio_url:
        typer.echo(submitted.studio_url, err=True)
    if stream:
        with readable_errors(f"stream {submitted.name}"):
            client.jobs.stream(submitted.name)


def _refuse_several_runs(job_file: Path, overrides: Sequence[str], run: str) -> None:
    from azureml_elastic.submit.yaml.job_file import read_document

    kind = read_document(job_file, overrides).get("type")
    runs = {"pipeline": ("elastic steps", "jobs.NAME"), "sweep": ("trials", "trial")}
    if kind in runs:
        which, where = runs[kind]
        raise UsageError(
            f"--resume-from continues the run of one job, and {job_file} is a {kind}, each of whose {which} is a run "
            f"of its own. To let them begin from the run's last checkpoint: --set {where}.elastic.resume_from={run}."
        )


def _check_combination(*, local: bool, dry_run: bool, stream: bool, **of_local: object) -> None:
    given = next((name for name, value in of_local.items() if value is not None), None)
    if not local and given is not None:
        raise UsageError(f"--{given.replace('_', '-')} needs --local: it concerns a run on this machine.")
    if local and (dry_run or stream):
        raise UsageError(f"--local and {'--dry-run' if dry_run else '--stream'} cannot be combined. Give one of them.")


@explained()
def schema() -> None:
    """Print the JSON schema of job files, by which editors complete and check the elastic: block."""
    from azureml_elastic.submit.yaml.elastic_block import schema_text

    typer.echo(schema_text(), nl=False)
