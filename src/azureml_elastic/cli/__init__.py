"""The command ``azureml-elastic``: one file for each group of commands."""

from __future__ import annotations

from azureml_elastic.cli.app import app, main

__all__ = ["app", "main"]
