"""The earlier run that a run continues: its last committed checkpoint, found before the node joins."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import posixpath

from azureml_elastic.checkpoint.format.catalogue import furthest, newest_committed
from azureml_elastic.checkpoint.format.manifest import Manifest
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config.plan import EarlierRun
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import CheckpointDamaged, UsageError
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.table import Table, open_table
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY

_LOG = logging.getLogger(__name__)


def with_earlier_checkpoint(identity: NodeIdentity, table: Table, environment: NodeEnvironment) -> NodeIdentity:
    """Return an identity whose plan names the last committed checkpoint of the run that this run continues, if any.

    A run that has a checkpoint of its own does not need the earlier one any more, which may be gone by then.

    Raises:
        UsageError: the earlier run does not exist, has no committed checkpoint, or keeps it in another place.
        TableError: the table is not available.
    """
    run = identity.plan.resume_from
    if run is None:
        return identity
    try:
        with contextlib.closing(open_table(identity.plan.rendezvous, run.name, environment)) as rows:
            reference = _find(run, identity.run_id, rows)
    except UsageError:
        if _pointer(table) is not None:
            return identity
        raise
    _LOG.info(
        "This run continues the run %s from step %d, its checkpoint %s, as long as it has none of its own.",
        run.name, reference.step, reference.directory,
    )  # fmt: skip
    found = run.model_copy(update={"checkpoint": reference.to_json()})
    return dataclasses.replace(identity, plan=identity.plan.model_copy(update={"resume_from": found}))


def _find(run: EarlierRun, run_id: str, rows: Table) -> Reference:
    begin = f"resume_from={run.name!r}"
    if run.name == run_id:
        raise UsageError(f"{begin} is this run itself. Submit the job with another name, or without resume_from.")
    if run.path is None:
        raise UsageError(
            f"{begin} needs a folder with the checkpoints of both runs. Start the node with --checkpoint-dir."
        )
    storage = open_storage(run.path)
    try:
        given = None if run.checkpoint is None else Reference.from_json(run.checkpoint)
        # What an agent of that run held in memory when it ended is committed by nobody, as no start has followed.
        reference = given or furthest(storage, _pointer(rows) or newest_committed(storage))
        if reference is None:
            raise UsageError(f"{begin}: {_reason(run, storage, rows)}")
        try:
            Manifest.read(storage, reference.directory)
        except CheckpointDamaged as error:
            before = newest_committed(storage)
            if before is None:
                raise UsageError(
                    f"{begin}: its last committed checkpoint, {reference.directory}, is not in {storage} ({error}). "
                    "Give the job the checkpoint path of that run."
                ) from error
            _LOG.warning(
                "The last committed checkpoint of the run %s, %s in %s, cannot be read (%s); this run continues from "
                "%s instead.",
                run.name, reference.directory, storage, error, before.directory,
            )  # fmt: skip
            reference = before
    except OSError as error:
        raise UsageError(f"{begin}: its checkpoints in {storage} cannot be read: {error}") from error
    return reference


def _pointer(rows: Table) -> Reference | None:
    row = rows.get(CHECKPOINT_KEY)
    pointer = None if row is None else row.value["pointer"]
    return None if pointer is None else Reference.from_json(pointer)


def _reason(run: EarlierRun, storage: Storage, rows: Table) -> str:
    """Return why there is nothing to continue from."""
    if storage.folders() or next(iter(rows.query("")), None) is not None:
        return (
            f"that run has no committed checkpoint in {storage}, so there is nothing to continue from. Submit the job "
            "without resume_from. A script without a session finds the checkpoints that it has saved by itself."
        )
    parent = posixpath.dirname(str(storage))
    near = difflib.get_close_matches(run.name, open_storage(parent).folders(), 1)
    return (
        f"there is no such run: neither has the table rows of it, nor {parent} a folder of its name"
        f"{f'; did you mean {near[0]!r}?' if near else '.'} Give the name of the run's first job, and the checkpoint "
        "path of that run."
    )
