"""The folder of an earlier local run that another one continues."""

from __future__ import annotations

import contextlib
from pathlib import Path

from azureml_elastic.checkpoint.format.catalogue import furthest, newest_committed
from azureml_elastic.checkpoint.storage.opening import open_storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import TableRendezvous
from azureml_elastic.config.plan import EarlierRun
from azureml_elastic.errors import TableError, TableForbidden, TableNotFound, UsageError
from azureml_elastic.ledger.summary import Paths, load_report
from azureml_elastic.local.table_choice import SQLITE_TABLE
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY
from azureml_elastic.node.table.sqlite import SqliteTable

__all__ = ["continued_runs", "find_earlier_run"]


def find_earlier_run(folder: Path) -> EarlierRun:
    """Return the run of a folder, to be continued.

    Raises:
        UsageError: the folder is not a run folder, or has no committed checkpoint.
    """
    report, path = load_report(folder.absolute()), Paths.of(folder.absolute()).checkpoints
    try:
        storage = open_storage(path)
        reference = furthest(storage, _pointer(folder / SQLITE_TABLE, report.name) or newest_committed(storage))
    except OSError as error:
        raise UsageError(f"The checkpoints of the run {folder} cannot be read: {error}") from error
    if reference is None:
        raise UsageError(
            f"The run {folder} has no committed checkpoint in {path}, so there is nothing to continue from. Start the "
            "program without --resume-from, or give another run."
        )
    run_id = report.name or folder.absolute().name
    return EarlierRun(name=run_id, path=str(path), checkpoint=reference.to_json())


def _pointer(table: Path, run_id: str) -> Reference | None:
    """Return the committed checkpoint that the run's table file names; ``None`` if the table was another one."""
    if not table.is_file() or not run_id:
        return None
    try:
        with contextlib.closing(SqliteTable(table, TableRendezvous().table, run_id)) as rows:
            row = rows.get(CHECKPOINT_KEY)
    except (TableError, TableNotFound, TableForbidden):  # the folder may be read-only
        return None
    pointer = None if row is None else row.value["pointer"]
    return None if pointer is None else Reference.from_json(pointer)


def continued_runs(folder: Path | None) -> tuple[Path, ...]:
    """Return the folders of a run and of those that it has continued, the first run first."""
    found: list[Path] = []
    while folder is not None:
        found.insert(0, folder.absolute())
        folder = load_report(folder).resumed_from
    return tuple(found)
