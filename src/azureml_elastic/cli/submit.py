"""``azureml-elastic submit``: submits a job file, with the user's own login."""

from __future__ import annotations

from typing import Annotated

import typer

from azureml_elastic.cli.compile import JobFile, Overrides
from azureml_elastic.cli.failures import GOES_ON, explained
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption, find_workspace

__all__ = ["submit"]


def submit(
    job_file: JobFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the compiled job without sending a request.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Show the run until it ends.")] = False,
    subscription: SubscriptionOption = None,
    group: GroupOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Submit JOB.YML; prints the name of the run, for the other commands.

    The workspace is given by the options, by Azure ML's environment variables, or by config.json. The login is that
    of azure-identity: az login, the environment variables of a service principal, or a managed identity.
    """
    with explained(GOES_ON):
        from azureml_elastic.submit.client import connect, readable_errors, silence_sdk_logs

        silence_sdk_logs()
        if dry_run:
            from azureml_elastic.submit.yaml.compiled_file import compile_file

            typer.echo(compile_file(job_file, None, overrides or ()).text, nl=False)
            return
        place = find_workspace(subscription, group, workspace)

        from azureml_elastic.submit.yaml.job_file import load_elastic_job

        job = load_elastic_job(job_file, overrides or ())
        client = connect(place.subscription, place.group, place.name)
        with readable_errors(f"submit {job_file}"):
            submitted = client.jobs.create_or_update(job)
        typer.echo(submitted.name)
        if submitted.studio_url:
            typer.echo(submitted.studio_url, err=True)
        if stream:
            with readable_errors(f"stream {submitted.name}"):
                client.jobs.stream(submitted.name)
