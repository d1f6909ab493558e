"""The commit of a checkpoint whose files are written: its manifest, the pointer in the table, then retention."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, Manifest
from azureml_elastic.checkpoint.format.retention import retire
from azureml_elastic.checkpoint.save.background_task import TaskOutcome
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.errors import Fenced, TableUnavailable
from azureml_elastic.ipc.agent_interface import Agent

__all__ = ["LONG_RETRY_SECONDS", "RETRY_SECONDS", "commit", "discard", "retry_while_unavailable"]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)

LONG_RETRY_SECONDS = (*RETRY_SECONDS, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0)
"""At the start, where training cannot begin without the committed checkpoint."""


def commit(
    storage: Storage,
    agent: Agent,
    manifest: Manifest,
    *,
    stall_seconds: float,
    pauses: tuple[float, ...],
    abandoned: Callable[[], bool] = lambda: False,
) -> TaskOutcome:
    """Publish a complete manifest and commit the checkpoint. For rank 0 alone; :func:`remove_older` follows.

    While the table is unavailable, the commit is tried again after each of the pauses in seconds. Nothing is committed
    once the round has ended (``abandoned``). Where the folder has been removed meanwhile, the outcome is ``failed``, so
    that another checkpoint is taken.
    """
    try:
        storage.publish(manifest.directory, MANIFEST, manifest.to_bytes())
    except (OSError, ValueError) as error:  # ValueError: the state is no JSON
        return discard(storage, manifest.directory, f"writing the manifest failed: {error}")
    if abandoned():
        return TaskOutcome("broken", "the round has ended")
    failure = retry_while_unavailable(lambda: agent.commit(manifest.reference, stall_seconds), pauses)
    if failure is not None:
        return failure
    try:
        storage.write(manifest.directory, COMMITTED, [])
    except FileNotFoundError:
        return TaskOutcome("failed", f"the folder {manifest.directory} was removed while it was committed")
    except Exception as error:  # noqa: BLE001 - the checkpoint is committed all the same
        _LOG.warning("The checkpoint %s/%s is committed, but not marked so: %s", storage, manifest.directory, error)
    return TaskOutcome("committed")


def remove_older(storage: Storage, manifest: Manifest, keep: int) -> None:
    """Remove all checkpoints of the run but ``keep``, if this one is committed and marked so. For rank 0 alone."""
    try:
        if storage.size(manifest.directory, COMMITTED) is not None:
            retire(storage, manifest, keep)
    except Exception as error:  # noqa: BLE001 - the checkpoint is committed all the same
        _LOG.warning("Old checkpoints in %s could not be removed: %s", storage, error)


def discard(storage: Storage, directory: str, reason: str) -> TaskOutcome:
    """Remove a failed attempt, as a full disk may be why it failed, and return its outcome."""
    with contextlib.suppress(OSError):
        storage.remove(directory, MANIFEST)
    return TaskOutcome("failed", reason)


def retry_while_unavailable(action: Callable[[], T], pauses: tuple[float, ...]) -> T | TaskOutcome:
    """Call the agent, again after each pause while the table is unavailable; return the result or the failure."""
    for pause in (*pauses, None):
        try:
            return action()
        except Fenced as error:
            return TaskOutcome("fenced", str(error))
        except TableUnavailable as error:
            if pause is None:
                return TaskOutcome("unavailable", str(error))
            time.sleep(pause)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            return TaskOutcome("failed", f"{type(error).__name__}: {error}")
    raise AssertionError
