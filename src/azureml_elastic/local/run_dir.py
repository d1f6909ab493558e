"""The folder of a local run."""

from __future__ import annotations

import secrets
import tempfile
from datetime import datetime
from pathlib import Path

from azureml_elastic.errors import UsageError
from azureml_elastic.free_space import free_bytes
from azureml_elastic.ledger.summary import Paths

__all__ = ["new_run_dir", "prepare_run_dir", "require_space"]

_MIB = 1 << 20
_REPORT_BYTES = 1 << 18
"""Space that is taken for the report when the run begins: a disk that fills up must not hide why the run has ended."""


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
        paths.report_part.write_bytes(bytes(_REPORT_BYTES))
    except OSError as error:
        raise UsageError(
            f"The run folder {run_dir} cannot be created: {error}. Choose another one with --run-dir."
        ) from error
    return paths


def require_space(run_dir: Path, disk_mib: int | None) -> None:
    """Check that the nodes of a run will not wait for space as soon as they start.

    Args:
        run_dir: folder of the run, which need not exist.
        disk_mib: free MiB that the nodes' health check requires, ``None`` for any.

    Raises:
        UsageError: less is free.
    """
    for what, option, folder in (
        ("run folder", "another one with --run-dir", run_dir),
        ("folder for temporary files", "another one with TMPDIR", Path(tempfile.gettempdir())),
    ):
        free = free_bytes(folder)
        if free is not None and free // _MIB < (disk_mib or 0):
            raise UsageError(
                f"The disk of the {what} {folder} has {free // _MIB:,} MiB free, and each node requires {disk_mib:,} "
                f"MiB (HealthPolicy.disk_mib). Free space on it, or choose {option}."
            )
