"""``azureml-elastic schema``: prints the JSON schema of job files, for editors."""

from __future__ import annotations

import typer

from azureml_elastic.cli.failures import explained

__all__ = ["schema"]


def schema() -> None:
    """Print the JSON schema of job files, by which editors complete and check the elastic: block."""
    with explained():
        from azureml_elastic.submit.yaml.block_schema import schema_text

        typer.echo(schema_text(), nl=False)
