"""``azureml-elastic compile``: writes a job file as the standard YAML that the az command line submits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import explained

__all__ = ["JobFile", "Overrides", "compile_"]

JobFile = Annotated[Path, typer.Argument(help="The YAML file of the job, with its elastic: block.", metavar="JOB.YML")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set a value of the file first, as in --set elastic.max_instance_count=12. May be repeated.",
        metavar="PATH=VALUE",
    ),
]


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
    # azure-ai-ml logs a warning for every experimental class and field, none of which the user has chosen.
    for name in ("_utils._experimental", "_schema.core.fields"):
        logging.getLogger(f"azure.ai.ml.{name}").setLevel(logging.ERROR)
    with explained():
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
