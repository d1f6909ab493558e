"""The folder of a local run."""

from __future__ import annotations

import secrets
from datetime import datetime
from pathlib import Path

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.summary import Paths

__all__ = ["new_run_dir", "prepare_run_dir"]


def new_run_dir(parent: Path = Path("runs")) -> Path:
    """Return an unused name for a run folder, without creating it."""
    return parent / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def prepare_run_dir(run_dir: Path) -> Paths:
    """Create the folder of a run and return its paths.

    Raises:
        UsageError: the folder already contains a run, or cannot be created.
    """
    paths = Paths.of(run_dir.absolute())
    if paths.events.exists():
        raise UsageError(
            f"The folder {run_dir} already contains a run. Choose another one with --run-dir, or delete it first."
        )
    try:
        for folder in (paths.events, paths.logs, paths.samples, paths.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The run folder {run_dir} cannot be created: {error}. Choose another one with --run-dir."
        ) from error
    return paths
