"""The run that a command's argument names: the folder of a run on this machine, or a submitted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.completion import complete_run
from azureml_elastic.errors import UsageError

__all__ = ["RunArgument", "run_folder"]

RunArgument = Annotated[
    str,
    typer.Argument(help="Folder of a run on this machine, or name of a submitted run.", autocompletion=complete_run),
]


def run_folder(run: str) -> Path | None:
    """Return the folder that an argument names, ``None`` for the name of a submitted run.

    Raises:
        UsageError: it is the path of a folder that does not exist.
    """
    folder = Path(run)
    if folder.is_dir():
        return folder
    if folder.name != run:
        raise UsageError(f"There is no folder {run}. Give the folder of a local run, or the name of a submitted one.")
    return None
