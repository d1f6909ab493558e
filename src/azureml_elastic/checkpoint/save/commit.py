"""The commit of a checkpoint whose files are written: its manifest, the pointer in the table, then retention."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, Manifest
from azureml_elastic.checkpoint.format.retention import retire
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.distributed.background_task import TaskKind, TaskOutcome
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
    keep: int,
    stall_seconds: float,
    pauses: tuple[float, ...],
    abandoned: Callable[[], bool] = lambda: False,
) -> TaskOutcome:
    """Publish a manifest, commit the checkpoint, and remove old ones. For rank 0 alone.

    Args:
        storage: storage of the checkpoints.
        agent: agent that writes the pointer to the table.
        manifest: complete manifest.
        keep: number of checkpoints to keep.
        stall_seconds: time that training waited for the checkpoint.
        pauses: seconds between attempts while the table is unavailable.
        abandoned: whether the round has ended, so that nothing is to be committed.
    """
    try:
        storage.publish(manifest.directory, MANIFEST, manifest.to_bytes())
    except (OSError, ValueError) as error:  # ValueError: the state is no JSON
        return discard(storage, manifest, f"writing the manifest failed: {error}")
    if abandoned():
        return TaskOutcome("broken", "the round has ended")
    _, (kind, text) = retry_while_unavailable(lambda: agent.commit(manifest.reference, stall_seconds), pauses)
    if kind is not None:
        return TaskOutcome(kind, text)
    try:
        storage.write(manifest.directory, COMMITTED, [])
        retire(storage, manifest, keep)
    except Exception as error:  # noqa: BLE001 - the checkpoint is committed all the same
        _LOG.warning("Old checkpoints in %s could not be removed: %s", storage, error)
    return TaskOutcome("committed")


def discard(storage: Storage, manifest: Manifest, reason: str) -> TaskOutcome:
    """Remove a failed attempt, as a full disk may be why it failed, and return its outcome."""
    with contextlib.suppress(OSError):
        storage.remove(manifest.directory, MANIFEST)
    return TaskOutcome("failed", reason)


def retry_while_unavailable(
    action: Callable[[], T], pauses: tuple[float, ...], sleep: Callable[[float], None] = time.sleep
) -> tuple[T | None, tuple[TaskKind | None, str]]:
    """Call the agent, repeatedly while the table is unavailable; return the result, and kind and text of a failure."""
    for pause in (*pauses, None):
        try:
            return action(), (None, "")
        except Fenced as error:
            return None, ("fenced", str(error))
        except TableUnavailable as error:
            if pause is None:
                return None, ("unavailable", str(error))
            sleep(pause)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            return None, ("failed", f"{type(error).__name__}: {error}")
    raise AssertionError
